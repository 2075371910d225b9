"""What each known fault of a mask and of where rows lie makes, to the slot, by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.checks.content import ContentCase
from opdtool.checks.faults_content import content_forms
from opdtool.checks.faults_masks import mask_forms
from opdtool.checks.faults_places import (
    MULTIPLES,
    cut_forms,
    late_rolls,
    placement_forms,
    tail_start,
)
from opdtool.checks.hypotheses import Form, MaskCase, MaskWeights
from opdtool.checks.recipes import After, Cut, Recipe, Shift, trace
from opdtool.checks.recipes_values import Cells, Slots, as_numbers
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from tests.checks.judging import MemoryBatch

NAMES = ("abcdefghijklmnop", "ABCDEFGHIJKLMNOP")
"""Column by column, what is in rows 0 and 1 of the batch, real or not."""


def case_of(
    lengths: list[int],
    padded: list[int],
    *,
    geometry: PackGeometry,
    cp: int = 1,
    width: int = 16,
    fits: bool = True,
    whole: bool | None = None,
) -> MaskCase:
    layout = PackedLayout.from_cu_seqlens(
        [0, *np.cumsum(lengths).tolist()],
        [0, *np.cumsum(padded).tolist()],
        cp_size=cp,
        sequence_index=list(range(min(2, len(lengths)))),
    )
    dumped = torch.zeros(layout.total)
    n = layout.num_rows
    batch = MemoryBatch({"token_mask": torch.ones(2, width)}, np.array(lengths[:n]), width)
    return MaskCase(
        slots=Slots(pieces=[lambda a, b: dumped[a:b]], sizes=[layout.total], decode=as_numbers),
        rows=np.arange(n),
        lengths=np.array(lengths[:n], dtype=np.int64),
        width=width,
        layout=layout if fits else None,
        geometry=geometry,
        whole=cp == 1 if whole is None else whole,
        weights=MaskWeights(
            tokens=Cells(batch=batch, name="token_mask", width=width, decode=as_numbers),
            sample=np.ones(2),
        ),
        shift=0,
    )


def shown(route: Recipe) -> str:
    """The columns behind each slot by their names, a dot where nothing is."""
    at = trace(route, np.arange(route.placement.layout.total))
    return "".join(
        NAMES[row][column] if real else "."
        for row, column, real in zip(
            at.row.tolist(), at.column.tolist(), at.real.tolist(), strict=True
        )
    )


def made(case: MaskCase, forms: Iterable[Form], fault: str) -> list[str | None]:
    """What the forms of one fault make of a case, None where they cannot be made."""
    built = [form.build(case, case.start) for form in forms if form.fault == fault]
    return [None if one is None else shown(one.filled.route) for one in built]


def notes(case: MaskCase, forms: Iterable[Form], fault: str) -> list[str | None]:
    built = [form.build(case, case.start) for form in forms if form.fault == fault]
    return [None if one is None else one.note for one in built]


FOUR = PackGeometry(pad_multiple=4)
TAIL = PackGeometry(pad_multiple=4, pad_packed_to=16)
APART = PackGeometry(pad_multiple=4, pad_packed_to=16, tail="segment")


def tailed() -> MaskCase:
    """abc. ABCDE... and a tail of four that the last segment absorbed."""
    return case_of([3, 5], [4, 12], geometry=TAIL)


def test_the_right_one_is_as_the_legend_says() -> None:
    assert shown(tailed().start.route) == "abc.ABCDE......."


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("laid-out-unpadded", ["abcABCDE........"]),
        ("left-padded-rows", [".abc.......ABCDE", "................"]),
        ("lengths-off-by-one", ["ab..ABCD........", "ab..ABCD........"]),
        ("tail-not-clamped", ["abc.ABCDEFGHI...", "abc.ABCDEFGHIJKL"]),
        ("cu-seqlens-padded-twice", ["abcdABCDEFGHIJKL"]),
        (
            "padding-multiple-wrong",
            [
                "abcABCDE........",
                None,  # by twos the first row takes 4 slots and all is right
                None,
                "abc.....ABCDE...",
                *[None] * 5,  # two rows of 16 and more have no room
            ],
        ),
    ],
)
def test_each_fault_of_placement_puts_rows_where_it_says(
    fault: str, expected: list[str | None]
) -> None:
    assert made(tailed(), placement_forms(), fault) == expected


def test_rows_aligned_in_the_batchs_width_lose_what_lies_past_their_length() -> None:
    case = case_of([3, 5], [4, 12], geometry=TAIL, width=6)
    forms = list(placement_forms())
    assert made(case, forms, "left-padded-rows")[1] == "....." + "ABCD" + "." * 7
    assert notes(case, forms, "left-padded-rows") == ["", "each row was right-aligned in the batch"]
    assert made(case, forms, "cu-seqlens-padded-twice") == ["abcdABCDEF......"]
    assert made(case, forms, "tail-not-clamped") == ["abc.ABCDEF......"] * 2


def test_what_is_padded_otherwise_says_to_what() -> None:
    found = notes(tailed(), placement_forms(), "padding-multiple-wrong")
    assert len(found) == len(MULTIPLES) == 9
    assert found[0] == "the content is padded to multiples of 1"
    assert found[3] == "the content is padded to multiples of 8"
    assert list(MULTIPLES) == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_shorter_rows_are_laid_out_anew_where_the_pack_keeps_its_slots() -> None:
    filled = case_of([5, 3], [8, 8], geometry=TAIL)
    forms = list(placement_forms())
    assert made(filled, forms, "lengths-off-by-one") == ["abcd....AB......", "abcdAB.........."]
    apart = case_of([5, 3, 0], [8, 4, 4], geometry=APART)
    assert made(apart, forms, "lengths-off-by-one") == ["abcd....AB......", "abcdAB.........."]
    shrunk = case_of([5, 3], [8, 4], geometry=FOUR)
    assert made(shrunk, forms, "lengths-off-by-one") == ["abcd....AB..", None]
    same = case_of([3, 4], [4, 4], geometry=FOUR)
    assert made(same, forms, "lengths-off-by-one") == ["ab..ABC.", "ab..ABC."]
    small = PackGeometry(pad_multiple=4, pad_packed_to=4)
    grown = case_of([5, 3], [8, 4], geometry=small)  # past what the geometry allows at all
    assert made(grown, forms, "lengths-off-by-one") == ["abcd....AB..", None]
    empty = case_of([0, 3], [0, 4], geometry=FOUR)
    assert made(empty, forms, "lengths-off-by-one") == ["AB..", "AB.."]
    room = case_of([0, 3], [4, 4], geometry=FOUR)
    assert made(room, forms, "lengths-off-by-one") == ["....AB..", None]


def test_faults_of_placement_need_a_layout_but_those_that_bring_one() -> None:
    twelve = PackGeometry(pad_multiple=4, pad_packed_to=12)
    case = case_of([3, 5], [6, 6], geometry=twelve, fits=False)
    forms = list(placement_forms())
    for fault in (
        "laid-out-unpadded",
        "left-padded-rows",
        "tail-not-clamped",
        "cu-seqlens-padded-twice",
    ):
        found = made(case, forms, fault)
        assert found
        assert set(found) == {None}
    assert made(case, forms, "lengths-off-by-one") == [None, "ab..ABCD...."]
    # What the geometry wants itself is no fault: where no layout fits something else is wrong.
    expected = ["abcABCDE....", "abc.ABCDE...", None, None, *[None] * 5]
    assert made(case, forms, "padding-multiple-wrong") == expected


def test_a_segment_of_its_own_for_the_tail_leaves_every_row_its_length() -> None:
    case = case_of([3, 5, 0], [4, 8, 4], geometry=APART)
    forms = list(placement_forms())
    assert made(case, forms, "tail-not-clamped") == [None, None]
    assert made(case, forms, "cu-seqlens-padded-twice") == ["abcdABCDEFGH...."]
    assert made(case, forms, "padding-multiple-wrong")[:4] == [
        "abcABCDE........",
        "abc.ABCDE.......",
        None,
        "abc.....ABCDE...",
    ]


def test_the_tail_begins_at_the_alignment_or_at_the_end_of_the_row() -> None:
    assert tail_start(tailed(), whole=False) == (1, 8, 12)
    assert tail_start(tailed(), whole=True) == (1, 5, 12)
    assert tail_start(case_of([3, 5], [4, 8], geometry=FOUR), whole=True) is None
    one = case_of([3], [12], geometry=FOUR)
    assert tail_start(one, whole=False) == (0, 4, 12)
    beside = case_of([3, 5, 0], [4, 8, 4], geometry=FOUR)  # what follows the rows is no part
    assert tail_start(beside, whole=False) is None
    none = case_of([3, 5], [4, 12], geometry=TAIL, fits=False)
    assert tail_start(none, whole=False) is None
    empty = case_of([], [], geometry=FOUR)
    assert tail_start(empty, whole=False) is None


def test_which_faults_of_placement_there_are_and_which_are_searched_for() -> None:
    forms = list(placement_forms())
    assert {form.axis for form in forms} == {"placement"}
    assert [form.fault for form in forms if form.search] == ["rows-permuted"] * 2
    assert [form.fault for form in forms] == [
        "laid-out-unpadded",
        *["rows-permuted"] * 2,
        *["left-padded-rows"] * 2,
        *["lengths-off-by-one"] * 2,
        *["tail-not-clamped"] * 2,
        "cu-seqlens-padded-twice",
        *["padding-multiple-wrong"] * 9,
    ]


def cut_case(whole: bool = False, cp: int = 2) -> MaskCase:
    """Rank 0: a. A BC.. -> by zig-zag windows of 4 and 8 slots."""
    return case_of(
        [3, 5], [4, 8], geometry=PackGeometry(cp_size=cp, pad_multiple=4), cp=cp, whole=whole
    )


def test_each_wrong_cut_gives_the_ranks_other_slots() -> None:
    case, forms = cut_case(), list(cut_forms())
    assert shown(case.start.route) == "a.AB..bcCDE."
    assert made(case, forms, "cp-contiguous") == ["abABCDc.E..."]
    # abc.ABCDE... in windows of 3: 0 and 3, 1 and 2
    assert made(case, forms, "cp-split-whole-pack") == ["abc....ABCDE", "abc.ABCDE..."]
    assert notes(case, forms, "cp-contiguous") == [
        "rank r holds the r-th contiguous piece of each sequence"
    ]
    assert notes(case, forms, "cp-split-whole-pack") == [
        "the zig-zag windows were cut from the whole pack",
        "contiguous pieces were cut from the whole pack",
    ]
    assert [(form.fault, form.axis, form.search) for form in forms] == [
        ("cp-contiguous", "cut", False),
        ("cp-rank-swapped", "cut", True),
        ("cp-split-whole-pack", "cut", False),
        ("cp-split-whole-pack", "cut", False),
    ]


def test_ranks_cut_nothing_of_a_whole_pack_or_alone() -> None:
    one = case_of([3, 5], [4, 8], geometry=FOUR, whole=False)
    for case in (cut_case(whole=True), one):
        forms = [form for form in cut_forms() if not form.search]
        assert [form.build(case, case.start) for form in forms] == [None] * 3
        late = list(late_rolls("mask-rolled-after-cp-cut", 1))
        assert [form.build(case, case.start) for form in late] == [None] * 4


def test_each_late_roll_is_made_on_a_ranks_own_piece() -> None:
    case = cut_case()
    forms = list(late_rolls("mask-rolled-after-cp-cut", 1))
    assert {form.axis for form in forms} == {"shift"}
    case.shift = 1
    assert made(case, forms, "mask-rolled-after-cp-cut") == [
        "..B...c.DE..",
        ".aB..AcbDE.C",
        ".AB...cCDE..",
        ".AB..acCDE.b",
    ]


def routes(shift: int) -> list[tuple[Any, ...]]:
    """Every form of a mask's own faults: name, axis, and what it changes."""
    case = tailed()
    case.shift = shift
    found = []
    for form in mask_forms(shift):
        if form.axis in ("placement", "cut") or "after-cp-cut" in form.fault:
            continue
        one = form.build(case, case.start)
        assert one is not None
        filled = one.filled
        changes: tuple[Any, ...] = ()
        if filled.route.shift != Shift(by=shift):
            changes += (filled.route.shift.kind, filled.route.shift.by)
        if filled.overlay != "none":
            changes += (filled.overlay, *(filled.tail if filled.overlay == "tail" else ()))
        if filled.token != "mask":
            changes += (filled.token,)
        if not filled.sample:
            changes += ("no sample",)
        found.append((form.fault, form.axis, *changes, *([one.note] if one.note else [])))
    return found


VALUES = [
    ("sample-mask-ignored", "sample", "no sample"),
    ("prompt-not-masked", "token", "ones"),
    ("mask-covers-padding", "overlay", "padding"),
    ("mask-inverted", "overlay", "inverse"),
    ("mask-inverted", "token", "inverse"),
]
TAILS = [
    ("tail-not-clamped", "overlay", "tail", 8, 12),
    ("tail-not-clamped", "overlay", "tail", 7, 11),
    ("tail-not-clamped", "overlay", "tail", 5, 12),
    ("tail-not-clamped", "overlay", "tail", 4, 11),
]


def test_the_faults_of_a_mask_that_speaks_of_the_next_token() -> None:
    assert routes(1) == [
        ("mask-not-shifted", "shift", "segment", 0),
        ("mask-shifted-right", "shift", "segment", -1),
        ("mask-shifted-twice", "shift", "segment", 2),
        ("mask-leaks-across-boundary", "shift", "pack-circular", 1),
        ("mask-wraps-within-segment", "shift", "segment-circular", 1),
        ("mask-last-slot-kept", "overlay", "last-slot"),
        *VALUES,
        *TAILS,
    ]


def test_the_faults_of_a_mask_that_speaks_of_a_later_token() -> None:
    def of(by: int) -> str:
        return f"the slots speak of token t{by:+d} instead of t+3"

    assert routes(3) == [
        ("mask-not-shifted", "shift", "segment", 0, of(0)),
        ("mask-not-shifted", "shift", "segment", 2, of(2)),
        ("mask-shifted-right", "shift", "segment", -3, of(-3)),
        ("mask-shifted-right", "shift", "segment", -1, of(-1)),
        ("mask-shifted-twice", "shift", "segment", 6, of(6)),
        ("mask-shifted-twice", "shift", "segment", 4, of(4)),
        ("mask-leaks-across-boundary", "shift", "pack-circular", 3),
        ("mask-wraps-within-segment", "shift", "segment-circular", 3),
        ("mask-last-slot-kept", "overlay", "last-slot"),
        *VALUES,
        *TAILS,
    ]


def test_a_shift_by_two_already_says_which_token_is_spoken_of() -> None:
    assert routes(2)[:2] == [
        ("mask-not-shifted", "shift", "segment", 0, "the slots speak of token t+0 instead of t+2"),
        ("mask-not-shifted", "shift", "segment", 1, "the slots speak of token t+1 instead of t+2"),
    ]


def test_the_faults_of_a_mask_that_is_not_shifted() -> None:
    assert routes(0) == [
        ("mask-shifted", "shift", "segment", 1),
        ("mask-shifted", "shift", "segment-circular", 1),
        ("mask-shifted", "shift", "pack-circular", 1),
        ("mask-shifted-right", "shift", "segment", -1),
        ("mask-shifted-twice", "shift", "segment", 2),
        *VALUES,
        *TAILS,
    ]


def test_a_mask_without_a_tail_has_no_tail_to_be_kept() -> None:
    case = case_of([3, 5], [4, 8], geometry=FOUR)
    forms = [form for form in mask_forms(1) if form.fault == "tail-not-clamped"]
    assert len(forms) == 6
    assert [form.build(case, case.start) for form in forms] == [None] * 6


@pytest.mark.parametrize(("shift", "by"), [(0, 1), (1, 1), (3, 3)])
def test_a_late_roll_of_a_mask_is_by_its_shift_or_by_one(shift: int, by: int) -> None:
    case = cut_case()
    late = [form for form in mask_forms(shift) if form.fault == "mask-rolled-after-cp-cut"]
    built = [form.build(case, case.start) for form in late]
    found = [one.filled.route.after for one in built if one is not None]
    assert found == [
        After(kind=kind, by=by) for kind in ("segment", "segment-circular", "rank", "rank-circular")
    ]
    assert all(one is not None and one.filled.route.shift == Shift(by=0) for one in built)
    assert all(one is not None and one.filled.route.cut == Cut(kind="zigzag") for one in built)


def test_a_mask_has_every_fault_of_placement_and_of_the_cut_as_well() -> None:
    names = [form.fault for form in mask_forms(1)]
    for others in (placement_forms(), cut_forms()):
        for form in others:
            assert form.fault in names
    assert len(names) == 11 + 19 + 4 + 4 + 4


def content_case(kind: Any) -> ContentCase:
    mask = cut_case()
    shared = {
        name: getattr(mask, name)
        for name in ("slots", "rows", "lengths", "width", "layout", "geometry", "whole")
    }
    return ContentCase(**shared, kind=kind, cells=mask.weights.tokens)


def described(kind: Any, *, axis: str) -> list[tuple[Any, ...]]:
    case = content_case(kind)
    found = []
    for form in content_forms(kind):
        if form.axis == axis:
            one = form.build(case, case.start)
            assert one is not None
            route = one.filled.route
            more = (one.filled.run, one.note) if one.filled.run != "restart" else ()
            after = (route.after.kind, route.after.by) if route.after.kind != "none" else ()
            found.append((form.fault, route.shift.kind, route.shift.by, *after, *more))
    return found


def test_targets_may_be_shifted_otherwise_or_too_late() -> None:
    late = "targets-rolled-after-cp-cut"
    assert described("targets", axis="shift") == [
        *[
            (late, "segment", 0, kind, 1)
            for kind in ("segment", "segment-circular", "rank", "rank-circular")
        ],
        ("targets-not-shifted", "segment", 0),
        ("targets-shifted-right", "segment", -1),
        ("targets-shifted-right", "segment-circular", -1),
        ("targets-shifted-right", "pack-circular", -1),
        ("targets-shifted-twice", "segment", 2),
        ("targets-shifted-twice", "segment-circular", 2),
        ("targets-shifted-twice", "pack-circular", 2),
        ("targets-cross-boundary", "pack-circular", 1),
    ]


def test_positions_may_run_on_over_the_pack_or_a_rank() -> None:
    fault = "positions-not-restarted"
    assert described("positions", axis="overlay") == [
        (fault, "segment", 0, "pack", "0 to T-1 over the whole pack"),
        (fault, "segment", 0, "rank", "0 to T/CP-1 on every rank"),
    ]


def test_each_kind_of_tensor_has_the_faults_that_can_show_in_it() -> None:
    cuts = [form.fault for form in cut_forms()]
    places = [form.fault for form in placement_forms()]
    for kind in ("tokens", "strict"):
        assert [form.fault for form in content_forms(kind)] == [*places, *cuts]
    assert [form.fault for form in content_forms("targets")][: len(places)] == places
    assert [form.fault for form in content_forms("targets")][-12 : -12 + 4] == cuts
    shows = ["laid-out-unpadded", *["padding-multiple-wrong"] * 9]
    assert [form.fault for form in content_forms("positions")] == [
        *shows,
        *cuts,
        *["positions-not-restarted"] * 2,
    ]
