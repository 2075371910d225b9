"""A mask's recipe by hand: two rows of weights and a tail, and what each change makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.checks.hypotheses import (
    NO_ROWS,
    Built,
    Filled,
    Form,
    MaskCase,
    MaskRecipe,
    MaskWeights,
    PackCase,
    close,
    cut_by,
    placed_by,
    shifted,
)
from opdtool.checks.recipes import After, Cut, Recipe, Shift, placed
from opdtool.checks.recipes_values import Cells, Slots, as_numbers
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from tests.checks.judging import MemoryBatch

WEIGHTS = [[0.5, 1.0, 3.0, 7.0], [0.25, 2.0, 5.0, 9.0]]
"""Row 0 has 3 real tokens, row 1 has 2; they lie in 4 slots each, and 4 more are a tail."""


def case_of(*, sample: tuple[float, float] = (1.0, 1.0), cp: int = 1, **more: Any) -> MaskCase:
    layout = PackedLayout.from_cu_seqlens(
        [0, 3, 5, 5], [0, 4, 8, 12], cp_size=cp, sequence_index=[0, 1]
    )
    mask = torch.tensor(WEIGHTS, dtype=torch.float64)
    batch = MemoryBatch({"token_mask": mask}, np.array([3, 2]), 4)
    dumped = torch.zeros(12, dtype=torch.float64)
    given: dict[str, Any] = {"layout": layout, "whole": cp == 1, **more}
    return MaskCase(
        slots=Slots(pieces=[lambda a, b: dumped[a:b]], sizes=[12], decode=as_numbers),
        rows=np.array([0, 1]),
        lengths=np.array([3, 2]),
        width=4,
        geometry=PackGeometry(cp_size=cp),
        weights=MaskWeights(
            tokens=Cells(batch=batch, name="token_mask", width=4, decode=as_numbers),
            sample=np.array(sample),
        ),
        **given,
    )


def made(case: MaskCase, **changes: Any) -> list[float]:
    assert case.right is not None
    found: list[float] = case.values(replace(case.right, **changes), np.arange(12)).tolist()
    return found


NONE = [0.0] * 4


def test_the_right_mask_is_each_next_tokens_weight() -> None:
    assert made(case_of()) == [1, 3, 0, 0, 2, 0, 0, 0, *NONE]
    assert made(case_of(sample=(2.0, 0.0))) == [2, 6, 0, 0, 0, 0, 0, 0, *NONE]
    assert made(case_of(shift=0)) == [0.5, 1, 3, 0, 0.25, 2, 0, 0, *NONE]


def test_tokens_may_be_ones_or_taken_from_one_and_the_sample_mask_may_be_left_out() -> None:
    case = case_of(sample=(2.0, 0.0))
    assert made(case, token="ones") == [2, 2, 0, 0, 0, 0, 0, 0, *NONE]
    assert made(case, token="inverse") == [0, -4, 0, 0, 0, 0, 0, 0, *NONE]
    assert made(case, sample=False) == [1, 3, 0, 0, 2, 0, 0, 0, *NONE]
    assert made(case, sample=False, token="ones") == [1, 1, 0, 0, 1, 0, 0, 0, *NONE]


def test_overlays_replace_slots_of_the_finished_mask() -> None:
    case = case_of(sample=(2.0, 1.0))
    assert made(case, overlay="last-slot") == [2, 6, 1, 0, 2, 1, 0, 0, *NONE]
    assert made(case, overlay="padding") == [2, 6, 0, 1, 2, 0, 1, 1, 1, 1, 1, 1]
    assert made(case, overlay="inverse") == [-1, -5, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1]
    assert made(case, overlay="tail", tail=(2, 4)) == [2, 6, 0, 0, 2, 0, 1, 1, *NONE]
    assert made(case, overlay="tail", tail=(1, 2)) == [2, 6, 0, 0, 2, 1, 0, 0, *NONE]
    assert made(case, overlay="tail") == made(case)


def test_the_tail_is_of_the_last_row_also_where_that_is_the_first_of_the_batch() -> None:
    layout = PackedLayout.from_cu_seqlens([0, 3, 3], [0, 4, 12], sequence_index=[0])
    assert made(case_of(layout=layout), overlay="tail", tail=(2, 4)) == [1, 3, 1, 1, *NONE, *NONE]


def test_dropped_rows_get_no_weight_from_the_last_slot_or_the_tail() -> None:
    dropped = case_of(sample=(1.0, 0.0))
    assert made(dropped, overlay="last-slot") == [1, 3, 1, 0, 0, 0, 0, 0, *NONE]
    assert made(dropped, overlay="tail", tail=(0, 4)) == made(dropped)
    other = case_of(sample=(0.0, 1.0))
    assert made(other, overlay="last-slot") == [0, 0, 0, 0, 2, 1, 0, 0, *NONE]
    assert made(other, overlay="padding") == [0, 0, 0, 1, 2, 0, 1, 1, 1, 1, 1, 1]


def test_what_a_late_roll_left_dead_stays_zero_under_every_overlay() -> None:
    case = case_of(cp=2)
    assert case.right is not None
    late = shifted(case.right, Shift(by=0), After(kind="segment", by=1))
    # Rank 0 holds positions 0 and 3 of each segment; the later one looks past its piece.
    at = np.arange(6)
    assert case.values(late, at).tolist() == [0, 0, 0, 0, 0, 0]
    inverse = replace(late, overlay="inverse")
    assert case.values(inverse, at).tolist() == [1, 0, 1, 0, 1, 0]
    padding = replace(late, overlay="padding")
    assert case.values(padding, at).tolist() == [1, 0, 1, 0, 1, 0]


def test_products_are_rounded_as_their_dtype_holds_them() -> None:
    weights = case_of().weights
    values = np.array([1.0, 1.001953125, 0.0])  # 1 + 2^-9
    assert weights.rounded(values).tolist() == values.tolist()
    rounded = replace(weights, rounding=torch.bfloat16).rounded(values)
    assert rounded.dtype == np.float64
    assert rounded.tolist() == [1.0, 1.0, 0.0]
    case = case_of(sample=(1.001953125, 1.0))
    case.weights = replace(case.weights, rounding=torch.bfloat16)
    assert made(case)[:2] == [1.0, 3.0]


def test_a_mask_where_no_layout_fits_is_made_from_nothing() -> None:
    case = case_of(layout=None)
    assert case.right is None
    start = case.start
    assert start.route.placement.layout.total == NO_ROWS.total == 0
    assert NO_ROWS.num_segments == 0
    assert start.route.shift == Shift(by=1)
    fits = case_of()
    assert fits.start.route.placement.layout is fits.layout


def test_the_right_route_cuts_by_ranks_unless_the_pack_is_whole() -> None:
    place = placed(NO_ROWS)
    assert case_of().route(place, 1).cut == Cut(kind="whole")
    zigzag = case_of(cp=2).route(place, 3)
    assert (zigzag.cut, zigzag.shift, zigzag.after) == (Cut(kind="zigzag"), Shift(by=3), After())


def test_each_change_of_a_route_leaves_its_other_axes() -> None:
    case = case_of(cp=2)
    right = case.right
    assert right is not None
    late = shifted(right, Shift(by=0), After(kind="rank", by=1))
    assert (late.route.shift, late.route.after) == (Shift(by=0), After(kind="rank", by=1))
    assert shifted(late, Shift(by=2)).route.after == After(kind="rank", by=1)
    assert late.route.cut == right.route.cut
    elsewhere = placed(NO_ROWS)
    moved = placed_by(late, elsewhere)
    assert moved.route.placement is elsewhere
    assert (moved.route.shift, moved.route.after) == (late.route.shift, late.route.after)
    cut = cut_by(late, Cut(kind="contiguous"))
    assert cut.route.cut.kind == "contiguous"
    assert cut.route.placement is late.route.placement
    assert replace(right, token="ones").sample is True


def test_a_case_agrees_slot_by_slot_within_its_tolerance() -> None:
    case, near = case_of(), case_of(atol=0.5)
    assert case.right is not None
    slots, actual = np.array([0, 1, 2]), np.array([1.0, 3.5, np.nan])
    assert case.agrees(case.right, slots, actual).tolist() == [True, False, False]
    assert near.agrees(case.right, slots, actual).tolist() == [True, True, False]


def test_numbers_are_close_up_to_the_tolerance_and_nan_to_nothing() -> None:
    one = np.array([0.0, 1.0, np.nan, np.inf, -1.0])
    assert close(one, one, 0.0).tolist() == [True, True, False, True, True]
    other = np.array([0.25, 0.75, np.nan, 0.0, -1.26])
    assert close(one, other, 0.25).tolist() == [True, True, False, False, False]
    assert close(one, other, 0.0).tolist() == [False] * 5
    assert close(np.array([0.0]), np.array([2.0]), 1.0).tolist() == [False]


def test_a_case_of_nothing_in_particular_says_that_its_parts_are_missing() -> None:
    mask = case_of()
    shared = {
        name: getattr(mask, name)
        for name in ("slots", "rows", "lengths", "width", "layout", "geometry", "whole")
    }
    case = PackCase(**shared)
    filled = Filled(
        route=Recipe(placement=placed(NO_ROWS), shift=Shift(by=0), cut=Cut(kind="whole"))
    )
    none = np.zeros(0, dtype=np.int64)
    for missing in (
        lambda: case.right,
        lambda: case.start,
        lambda: case.values(filled, none),
        lambda: case.agrees(filled, none, none),
    ):
        with pytest.raises(NotImplementedError):
            missing()
    assert case.room is mask.slots.room
    assert (case.neutral, case.mismatches, case.sample, case.surplus) == ((0.0,), 0, None, None)


def test_a_form_is_not_searched_for_unless_it_says_so_and_what_is_built_has_no_note() -> None:
    form = Form(fault="mask-shifted", axis="shift", build=lambda case, filled: None)
    assert form.search is False
    assert Built(filled=1).note == ""
    plain = MaskRecipe(route=case_of().route(placed(NO_ROWS), 1))
    assert (plain.token, plain.sample, plain.overlay, plain.tail) == ("mask", True, "none", (0, 0))
