"""Orders of rows and of ranks found in short dumps, and none where there is none or several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.checks import faults_search as module
from opdtool.checks.faults_search import (
    _bits,
    _columns,
    _multipliers,
    _row_for_a_wrong_segment,
    _row_for_the_first_slots,
    _same_amount,
    _some_row_makes,
    find_ranks,
    match_order,
    name_order,
    order_segments,
    permuted_and_laid_out,
    permuted_rows,
    row_prints,
    segment_prints,
    swapped_ranks,
    with_tail,
)
from opdtool.checks.hypotheses import Built, MaskCase, MaskWeights, cut_by, shifted
from opdtool.checks.recipes import After, Bools, Cut, Ints, Shift
from opdtool.checks.recipes_values import Cells, Slots, Values, as_numbers
from opdtool.checks.room import ROOM
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from tests.checks.judging import MemoryBatch

# Rows of 3, 4 and 2 tokens, each with weights of its own.
ROWS = [[1.0, 2, 3, 9, 9, 9, 9, 9], [4.0, 5, 6, 7, 9, 9, 9, 9], [8.0, 11, 9, 9, 9, 9, 9, 9]]
LENGTHS = [3, 4, 2]
FOUR = PackGeometry(pad_multiple=4)


def case_of(
    dumped: list[float],
    *,
    padded: list[int] | None = None,
    cp: int = 1,
    geometry: PackGeometry = FOUR,
    rows: list[list[float]] = ROWS,
    lengths: list[int] = LENGTHS,
    index: list[int] | None = None,
    slots: int = ROOM.slots,
    cells: int = ROOM.cells,
    **more: Any,
) -> MaskCase:
    """A dump of a mask that is not shifted, with the padded lengths of the dump."""
    padded = [4, 4, 4] if padded is None else padded
    index = list(range(len(lengths))) if index is None else index
    real = [*lengths, *[0] * (len(padded) - len(lengths))]
    layout = PackedLayout.from_cu_seqlens(
        [0, *np.cumsum(np.minimum(real, padded)).tolist()],
        [0, *np.cumsum(padded).tolist()],
        cp_size=cp,
        sequence_index=index,
    )
    held = torch.tensor(dumped, dtype=torch.float64)
    size = len(dumped) // cp
    batch = MemoryBatch({"token_mask": torch.tensor(rows, dtype=torch.float64)}, np.array([]), 8)
    given: dict[str, Any] = {"shift": 0, "whole": cp == 1, "layout": layout, **more}
    case = MaskCase(
        slots=Slots(
            pieces=[lambda a, b, i=i: held[i * size + a : i * size + b] for i in range(cp)],  # type: ignore[misc]
            sizes=[size] * cp,
            decode=as_numbers,
            room=replace(ROOM, slots=slots, cells=cells),
        ),
        rows=np.array(index),
        lengths=np.array(lengths),
        width=8,
        geometry=geometry,
        weights=MaskWeights(
            tokens=Cells(batch=batch, name="token_mask", width=8, decode=as_numbers),
            sample=np.ones(len(rows)),
        ),
        **given,
    )
    if case.layout is not None and case.layout.total == case.slots.total:
        at = np.arange(len(dumped))
        case.mismatches = int((~case.agrees(case.start, at, case.slots.take(at))).sum())
    return case


def filled_with(built: Built | None, case: MaskCase) -> list[float]:
    assert built is not None
    found: list[float] = case.values(built.filled, np.arange(case.slots.total)).tolist()
    return found


RIGHT = [1.0, 2, 3, 0, 4, 5, 6, 7, 8, 11, 0, 0]
TURNED = [8.0, 11, 0, 0, 1, 2, 3, 0, 4, 5, 6, 7]
"""Rows 2, 0, 1."""


def test_rows_in_another_order_are_found_and_named() -> None:
    case = case_of(TURNED)
    assert case.mismatches == 11
    built = permuted_rows(case, case.start)
    assert filled_with(built, case) == TURNED
    assert built is not None
    assert built.note == "the segments hold rows 2, 0, 1"
    named = case_of(TURNED, rows=[[0.0] * 8, *ROWS], index=[1, 2, 3])
    other = permuted_rows(named, named.start)
    assert other is not None
    assert other.note == "the segments hold rows 3, 1, 2"
    assert filled_with(other, named) == TURNED


def test_the_right_order_is_no_fault_and_neither_is_one_that_no_row_makes() -> None:
    right = case_of(RIGHT)
    assert right.mismatches == 0
    assert permuted_rows(right, right.start) is None
    strange = case_of([*TURNED[:-1], 99.0])
    assert permuted_rows(strange, strange.start) is None
    twice = case_of([8.0, 11, 0, 0, 1, 2, 3, 0, 8, 11, 0, 0])
    assert permuted_rows(twice, twice.start) is None


def test_rows_that_are_the_same_have_no_one_order() -> None:
    same = [ROWS[0], ROWS[1], ROWS[0]]
    case = case_of([4, 5, 6, 7, 1, 2, 3, 0, 1, 2, 3, 0], rows=same, lengths=[3, 4, 3])
    assert case.mismatches
    assert permuted_rows(case, case.start) is None


def test_one_row_has_no_other_order_and_two_have() -> None:
    one = case_of([9.0, 9, 9, 9], lengths=[3], padded=[4])
    assert permuted_rows(one, one.start) is None
    two = case_of([4, 5, 6, 7, 1, 2, 3, 0], lengths=[3, 4], padded=[4, 4])
    assert filled_with(permuted_rows(two, two.start), two) == [4, 5, 6, 7, 1, 2, 3, 0]


def test_no_order_is_looked_for_without_a_layout_beside_swapped_ranks_or_a_late_roll() -> None:
    case = case_of(TURNED)
    start = case.start
    assert permuted_rows(case, cut_by(start, Cut(kind="whole", order=(0,)))) is None
    assert permuted_rows(case, shifted(start, Shift(by=0), After(kind="rank", by=1))) is None
    assert permuted_rows(case_of(TURNED, layout=None), start) is None


def test_a_tail_segment_holds_no_row_and_a_row_that_does_not_fit_is_cut() -> None:
    tailed = case_of([*TURNED, 0, 0, 0, 0], padded=[4, 4, 4, 4])
    built = permuted_rows(tailed, tailed.start)
    assert filled_with(built, tailed) == [*TURNED, 0, 0, 0, 0]
    assert built is not None
    assert built.filled.route.placement.row.tolist() == [2, 0, 1, -1]
    assert built.filled.route.placement.length.tolist() == [2, 3, 4, 0]


def test_lengths_that_the_dump_tells_tell_rows_apart_that_look_the_same() -> None:
    rows = [[1.0, 0, 0, 0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0, 0, 0], ROWS[1]]
    dumped = [4.0, 5, 6, 7, 1, 0, 0, 0, 1, 0, 0, 0]

    def order(told: list[int] | None) -> str | None:
        case = case_of(dumped, rows=rows, lengths=[3, 2, 4])
        case.dump_lengths = None if told is None else np.array(told)
        built = permuted_rows(case, case.start)
        return None if built is None else built.note

    assert order(None) is None
    assert order([4, 2, 3]) == "the segments hold rows 2, 1, 0"
    assert order([4, 3, 2]) == "the segments hold rows 2, 0, 1"
    assert order([4, 4, 4]) is None  # not the batch's lengths at all
    unlike = case_of(TURNED, dump_lengths=np.array([4, 4, 4]))
    assert filled_with(permuted_rows(unlike, unlike.start), unlike) == TURNED


def test_a_wrong_slot_that_no_row_makes_ends_the_search_before_all_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def counted(case: MaskCase, filled: Any, layout: PackedLayout) -> Ints:
        seen.append(layout.total)
        return segment_prints(case, filled, layout)

    monkeypatch.setattr(module, "segment_prints", counted)
    case = case_of([99.0, *TURNED[1:]], sample=np.arange(12))
    assert permuted_rows(case, case.start) is None
    assert seen == []
    case = case_of(TURNED, sample=np.arange(12))
    assert filled_with(permuted_rows(case, case.start), case) == TURNED
    assert seen == [12]


def test_as_much_must_be_trained_in_any_order() -> None:
    case = case_of(TURNED)
    case.surplus = 0
    assert permuted_rows(case, case.start) is not None
    case.surplus = 1
    assert permuted_rows(case, case.start) is None
    # Beside another fault the count says nothing.
    assert permuted_rows(case, shifted(case.start, Shift(by=1))) is None  # nor does it fit
    ones = replace(case.start, token="ones")
    made = case_of([1.0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1])
    made.surplus = 3
    assert permuted_rows(made, ones) is not None
    # Rows that do not fit leave values out that another order would bring.
    cut = case_of([8.0, 11, 1, 2, 3, 0, 4, 5, 6, 7], padded=[2, 4, 4])
    cut.surplus = 1
    assert permuted_rows(cut, cut.start) is not None


def test_each_row_may_take_its_own_room_in_another_order() -> None:
    lengths, right = [3, 5, 2], [4, 8, 4]
    rows = [ROWS[0], [4.0, 5, 6, 7, 8, 9, 9, 9], [11.0, 12, 9, 9, 9, 9, 9, 9]]
    moved = [11.0, 12, 0, 0, 4, 5, 6, 7, 8, 0, 0, 0, 1, 2, 3, 0]
    case = case_of(moved, padded=right, lengths=lengths, rows=rows)
    built = permuted_and_laid_out(case, case.start)
    assert filled_with(built, case) == moved
    assert built is not None
    assert built.note == "the segments hold rows 2, 1, 0"
    assert built.filled.route.placement.layout.padded_lengths.tolist() == [4, 8, 4]
    blocks = case_of(moved, padded=right, lengths=lengths, rows=rows, slots=5)
    assert filled_with(permuted_and_laid_out(blocks, blocks.start), blocks) == moved
    little = case_of(moved, padded=right, lengths=lengths, rows=rows, cells=8)
    assert filled_with(permuted_and_laid_out(little, little.start), little) == moved
    other = case_of([*moved[:-1], 1.0], padded=right, lengths=lengths, rows=rows)
    assert permuted_and_laid_out(other, other.start) is None
    blocks = case_of([*moved[:-1], 1.0], padded=right, lengths=lengths, rows=rows, slots=5)
    assert permuted_and_laid_out(blocks, blocks.start) is None
    threes = PackGeometry(pad_multiple=3)
    odd = case_of(
        [4.0, 5, 6, 7, 8, 0, 1, 2, 3], padded=[3, 6], lengths=[3, 5], rows=rows, geometry=threes
    )
    built = permuted_and_laid_out(odd, odd.start)
    assert filled_with(built, odd) == [4, 5, 6, 7, 8, 0, 1, 2, 3]
    in_order = [1.0, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0, 11, 12, 0, 0]
    same = case_of(in_order, padded=right, lengths=lengths, rows=rows)
    assert permuted_and_laid_out(same, same.start) is None


def test_each_rank_tells_of_an_order_with_rooms_of_their_own() -> None:
    lengths = [3, 5]
    rows = [ROWS[0], [4.0, 5, 6, 7, 8, 9, 9, 9]]
    # 4 5 6 7 8 . . . | 1 2 3 . cut by windows of 2 and of 1
    moved = [4.0, 5, 0, 0, 1, 0, 6, 7, 8, 0, 2, 3]
    geometry = PackGeometry(cp_size=2, pad_multiple=4)
    case = case_of(moved, padded=[4, 8], lengths=lengths, rows=rows, cp=2, geometry=geometry)
    built = permuted_and_laid_out(case, case.start)
    assert filled_with(built, case) == moved
    assert built is not None
    assert built.note == "the segments hold rows 1, 0"
    assert built.filled.route.placement.layout.cp_size == 2


def test_an_order_with_rooms_of_their_own_is_looked_for_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = [4.0, 5, 6, 7, 8, 0, 0, 0, 1, 2, 3, 0]
    rows = [ROWS[0], [4.0, 5, 6, 7, 8, 9, 9, 9]]
    case = case_of(moved, padded=[4, 8], lengths=[3, 5], rows=rows)
    start = case.start
    assert permuted_and_laid_out(case, start) is not None
    assert permuted_and_laid_out(case, cut_by(start, Cut(kind="whole", order=(0,)))) is None
    late = shifted(start, Shift(by=0), After(kind="rank", by=1))
    assert permuted_and_laid_out(case, late) is None
    small = case_of(moved[:8], padded=[4, 4], lengths=[3, 5], rows=rows)
    assert permuted_and_laid_out(small, small.start) is None  # no room for both
    one = case_of([9.0, 9, 9, 9], padded=[4], lengths=[3], rows=rows)
    assert permuted_and_laid_out(one, one.start) is None
    monkeypatch.setattr(module, "MOST_ORDERED", 12)
    assert permuted_and_laid_out(case, start) is not None
    monkeypatch.setattr(module, "MOST_ORDERED", 11)
    assert permuted_and_laid_out(case, start) is None


def test_the_last_row_of_an_order_takes_what_is_left() -> None:
    rows = [ROWS[0], [4.0, 5, 6, 7, 8, 9, 9, 9]]
    moved = [4.0, 5, 6, 7, 8, 0, 0, 0, 1, 2, 3, *[0.0] * 5]
    absorbed = case_of(moved, padded=[4, 12], lengths=[3, 5], rows=rows)
    built = permuted_and_laid_out(absorbed, absorbed.start)
    assert filled_with(built, absorbed) == moved
    assert built is not None
    assert built.filled.route.placement.layout.padded_lengths.tolist() == [8, 8]
    apart = replace(FOUR, tail="segment")
    own = case_of(moved, padded=[4, 8, 4], lengths=[3, 5], rows=rows, geometry=apart)
    built = permuted_and_laid_out(own, own.start)
    assert built is not None
    assert built.filled.route.placement.layout.padded_lengths.tolist() == [8, 4, 4]


def laid(
    case: MaskCase, lengths: list[int], padded: list[int]
) -> tuple[list[int], list[int]] | None:
    made = with_tail(case, np.array(lengths), np.array(padded), case.rows)
    return None if made is None else (made.lengths.tolist(), made.padded_lengths.tolist())


def test_what_is_left_of_a_dump_goes_where_the_geometry_says() -> None:
    case = case_of([0.0] * 16)
    assert laid(case, LENGTHS, [4, 4, 8]) == (LENGTHS, [4, 4, 8])
    assert laid(case, LENGTHS, [4, 4, 4]) == (LENGTHS, [4, 4, 8])
    assert laid(case, LENGTHS, [4, 4, 12]) is None
    assert laid(case, [], []) is None
    apart = case_of([0.0] * 16, geometry=replace(FOUR, tail="segment"))
    assert laid(apart, LENGTHS, [4, 4, 4]) == ([*LENGTHS, 0], [4, 4, 4, 4])
    assert laid(apart, LENGTHS, [4, 4, 8]) == (LENGTHS, [4, 4, 8])
    two = PackGeometry(cp_size=2)
    ranks = case_of([0.0] * 16, cp=2, geometry=two)
    assert laid(ranks, LENGTHS, [4, 4, 4]) == (LENGTHS, [4, 4, 8])
    assert laid(ranks, LENGTHS, [4, 6, 6]) is None
    assert laid(case, LENGTHS, [3, 5, 8]) == (LENGTHS, [3, 5, 8])
    four = case_of([0.0] * 32, padded=[8, 8, 16], cp=4, geometry=PackGeometry(cp_size=4))
    assert laid(four, LENGTHS, [8, 8, 8]) == (LENGTHS, [8, 8, 16])
    whole = case_of([0.0] * 16, cp=2, geometry=two, whole=True)
    assert laid(whole, LENGTHS, [4, 6, 6]) == (LENGTHS, [4, 6, 6])
    made = with_tail(ranks, np.array(LENGTHS), np.array([4, 4, 8]), ranks.rows)
    assert made is not None
    assert (made.cp_size, made.sequence_index.tolist()) == (2, [0, 1, 2])


def orders(there: list[int], expected: list[int], sizes: list[int]) -> list[list[int]]:
    found = order_segments(np.array(there), np.array(expected), np.array(sizes))
    return [order.tolist() for order in found]


def test_the_order_of_segments_is_found_from_the_first_slot_on() -> None:
    expected, sizes = [1, 2, 3, 4, 5, 6], [2, 3, 1]
    assert orders([6, 1, 2, 3, 4, 5], expected, sizes) == [[2, 0, 1]]
    assert orders([3, 4, 5, 6, 1, 2], expected, sizes) == [[1, 2, 0]]
    assert orders([1, 2, 6, 3, 4, 5], expected, sizes) == [[0, 2, 1]]
    assert orders(expected, expected, sizes) == []
    empty = orders([3, 4, 5, 1, 2], [1, 2, 3, 4, 5], [2, 3, 0])  # one is anywhere
    assert sorted(empty) == [[1, 0, 2], [1, 2, 0], [2, 1, 0]]
    assert orders([6, 9, 9, 9, 9, 9], expected, sizes) == []
    # The last one is what is left, however it goes on.
    assert orders([6, 1, 2, 99, 99, 99, 99], expected, sizes) == [[2, 0, 1]]


def test_segments_that_are_the_same_and_orders_without_end_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert orders([1, 2, 2], [1, 1, 2], [1, 1, 1]) == []
    assert orders([0, 0, 0, 5], [0, 0, 0, 5], [1, 2, 1]) == [[1, 0, 2]]
    found = orders([6, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [2, 3, 1])
    assert len(found) == 1
    monkeypatch.setattr(module, "MOST_STEPS", 3)
    assert orders([6, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [2, 3, 1]) == found
    monkeypatch.setattr(module, "MOST_STEPS", 4)
    assert orders([6, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [2, 3, 1]) == found
    monkeypatch.setattr(module, "MOST_STEPS", 2)
    assert orders([6, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [2, 3, 1]) == []


def test_no_more_orders_than_said_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1, 2, 3, 4]
    zeros = [0] * 10
    many = orders(zeros, zeros, sizes)
    assert len(many) == 0  # more than sixteen of the 24 orders fit
    few = orders(zeros[:6], zeros[:6], sizes[:3])
    assert sorted(few) == sorted([[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
    monkeypatch.setattr(module, "MOST_FOUND", 5)
    assert sorted(orders(zeros[:6], zeros[:6], sizes[:3])) == sorted(few)
    monkeypatch.setattr(module, "MOST_FOUND", 4)
    assert orders(zeros[:6], zeros[:6], sizes[:3]) == []


def test_an_order_in_words_is_cut_short_after_sixteen() -> None:
    assert name_order(np.arange(3)) == "0, 1, 2"
    sixteen = ", ".join(map(str, range(16)))
    assert name_order(np.arange(16)) == sixteen
    assert name_order(np.arange(18)) == f"{sixteen} and 2 more"
    assert name_order(np.arange(17)) == f"{sixteen} and 1 more"


def matched(there: list[int], rows: list[int], *told: list[int]) -> list[int] | None:
    first = np.array(told[0]) if told else None
    found = match_order(
        np.array(there), np.array(rows), first, np.array(told[1]) if told else np.array([])
    )
    return None if found is None else found.tolist()


def test_prints_are_matched_where_there_is_one_other_order() -> None:
    assert matched([7, 5, 6], [5, 6, 7]) == [2, 0, 1]
    assert matched([5, 6, 7], [5, 6, 7]) is None
    assert matched([5, 6, 8], [5, 6, 7]) is None
    assert matched([5, 5, 6], [5, 6, 7]) is None
    assert matched([6, 8, 7], [5, 6, 7]) is None
    assert matched([6, 5, 5], [5, 6, 5]) is None
    assert matched([6, 5, 5], [5, 6, 5], [1, 3, 2], [2, 1, 3]) == [1, 2, 0]
    assert matched([6, 5, 5], [5, 6, 5], [1, 2, 2], [2, 1, 3]) is None


def test_segments_and_rows_have_the_same_prints_where_they_hold_the_same() -> None:
    case = case_of(TURNED)
    assert case.layout is not None
    there = segment_prints(case, case.start, case.layout)
    rows = row_prints(case, case.start)
    assert len({*rows.tolist()}) == 3
    assert there.tolist() == rows[[2, 0, 1]].tolist()
    blocks = case_of(TURNED, slots=5)
    assert segment_prints(blocks, blocks.start, case.layout).tolist() == there.tolist()
    assert row_prints(blocks, blocks.start).tolist() == rows.tolist()
    back = shifted(case.start, Shift(by=-1))
    moved = case_of([0.0, 1, 2, 3, 0, 4, 5, 6, 7, 0, 0, 8, 11, 0, 0], padded=[4, 6, 5])
    assert moved.layout is not None
    found = segment_prints(moved, back, moved.layout)
    assert found[:2].tolist() == row_prints(moved, back)[:2].tolist()
    empty = case_of([0.0] * 12)
    assert segment_prints(empty, empty.start, case.layout).tolist() == [0, 0, 0]


def test_multipliers_kept_at_hand_are_those_made_as_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(TURNED)
    assert case.layout is not None
    kept = segment_prints(case, case.start, case.layout)
    monkeypatch.setattr(module, "TABLE", 3)
    assert segment_prints(case, case.start, case.layout).tolist() == kept.tolist()


def ranked_case(dumped: list[float], **more: Any) -> MaskCase:
    geometry = PackGeometry(cp_size=2, pad_multiple=4)
    more = {"sample": np.arange(12), **more}
    return case_of(dumped, cp=2, geometry=geometry, **more)


def test_the_pieces_of_the_ranks_in_another_order_are_found() -> None:
    right = [1.0, 0, 4, 7, 8, 0, 2, 3, 5, 6, 11, 0]
    case = ranked_case(right)
    assert case.mismatches == 0
    assert swapped_ranks(case, case.start) is None
    swapped = ranked_case([*right[6:], *right[:6]])
    built = swapped_ranks(swapped, swapped.start)
    assert filled_with(built, swapped) == [*right[6:], *right[:6]]
    assert built is not None
    assert built.note == "the files are those of ranks 1, 0, in this order"
    assert built.filled.route.cut == Cut(kind="zigzag", order=(1, 0))
    contiguous = cut_by(swapped.start, Cut(kind="contiguous"))
    assert swapped_ranks(swapped, contiguous) is None
    some = ranked_case([*right[6:], *right[:6]], sample=np.array([6, 8]))
    assert swapped_ranks(some, some.start) is not None
    assert swapped_ranks(ranked_case([*right[6:], *right[:6]], sample=None), swapped.start) is None
    whole = ranked_case([*right[6:], *right[:6]], whole=True)
    assert swapped_ranks(whole, whole.start) is None
    one = case_of(TURNED, sample=np.arange(12), whole=False)
    assert swapped_ranks(one, one.start) is None


def ranks(pieces: list[list[int]], right: list[list[int]], size: int) -> tuple[int, ...] | None:
    dumped, good = np.array(pieces).ravel(), np.array(right).ravel()

    def take(slots: Ints) -> Values:
        return np.asarray(dumped[slots])

    def agrees(slots: Ints, actual: Values) -> Bools:
        return np.asarray(good[slots] == actual)

    return find_ranks(len(pieces), size, np.arange(size), take, agrees)


def test_ranks_are_assigned_one_each_and_their_own_where_that_fits() -> None:
    right = [[1, 2], [3, 4], [5, 6]]
    assert ranks([[5, 6], [1, 2], [3, 4]], right, 2) == (2, 0, 1)
    assert ranks([[1, 2], [5, 6], [3, 4]], right, 2) == (0, 2, 1)
    assert ranks(right, right, 2) is None
    assert ranks([[1, 2], [5, 6], [5, 6]], right, 2) is None
    assert ranks([[1, 2], [3, 9], [5, 6]], right, 2) is None
    same = [[1, 2], [1, 2], [5, 6]]
    assert ranks([[5, 6], [1, 2], [1, 2]], same, 2) == (2, 1, 0)
    assert ranks([[1, 2], [5, 6], [1, 2]], same, 2) == (0, 2, 1)
    assert ranks([[1, 2], [1, 2], [5, 6]], same, 2) is None


def test_so_many_slots_of_a_piece_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COMPARED", 2)
    asked: list[int] = []

    def take(slots: Ints) -> Values:
        asked.append(len(slots))
        return slots

    assert find_ranks(2, 8, np.arange(8), take, lambda slots, actual: slots == actual) is None
    assert asked == [2, 2]


def some_row(dumped: list[float], **more: Any) -> bool:
    """Whether a cheap look at the first wrong slots leaves an order of rows possible."""
    case = case_of(dumped, **{"sample": np.arange(len(dumped)), **more})
    assert case.layout is not None
    return _row_for_a_wrong_segment(case, case.start, case.layout)


def test_a_cheap_look_turns_down_what_no_row_makes_and_nothing_else() -> None:
    assert some_row(TURNED)
    assert not some_row([99.0, *TURNED[1:]])
    assert some_row(RIGHT)  # nothing wrong to look at
    assert some_row([99.0, *TURNED[1:]], sample=None)
    assert some_row([99.0, *TURNED[1:]], surplus=0)
    # The third segment alone is wrong, from its first slot on.
    assert some_row([*RIGHT[:8], 1.0, 2, 3, 0])
    assert not some_row([*RIGHT[:8], 1.0, 2, 99, 0])
    # From its second slot on: what is before it is not looked at.
    assert some_row([*RIGHT[:4], 4.0, 11, 0, 0, *RIGHT[8:]])
    assert not some_row([*RIGHT[:4], 4.0, 12, 0, 0, *RIGHT[8:]])
    # The last slot of a segment, and of the dump, has none beside it.
    for at, good in ((3, 7.0), (11, 7.0)):
        assert some_row([*RIGHT[:at], good, *RIGHT[at + 1 :]])
        assert not some_row([*RIGHT[:at], 5.0, *RIGHT[at + 1 :]])
    # A tail is of no row, whatever it holds.
    assert some_row([*RIGHT, 99.0, 0, 0, 0], padded=[4, 4, 4, 4])


def test_a_cheap_look_follows_a_segment_on_its_own_rank_as_far_as_it_goes() -> None:
    moved = [8.0, 0, 1, 0, 4, 7, 11, 0, 2, 3, 5, 6]  # rows 2, 0, 1, cut by zig-zag windows
    geometry = PackGeometry(cp_size=2, pad_multiple=4)
    assert some_row(moved, cp=2, geometry=geometry)
    # On rank 0 position 3 follows position 0: it is not looked at beside it.
    assert some_row([8.0, 99, *moved[2:]], cp=2, geometry=geometry)
    assert not some_row([99.0, *moved[1:]], cp=2, geometry=geometry)
    # Rank 1 begins with positions 1 and 2 of a segment.
    rank1 = [1.0, 0, 4, 7, 8, 0, 5, 6, 5, 6, 11, 0]
    assert some_row(rank1, cp=2, geometry=geometry)
    assert not some_row([*rank1[:7], 99.0, *rank1[8:]], cp=2, geometry=geometry)


def first_slots(dumped: list[float], local: list[int], filled: Any = None, **more: Any) -> bool:
    case = case_of(dumped, **more)
    return _row_for_the_first_slots(case, filled or case.start, np.array(local))


def test_what_a_dump_begins_with_must_be_some_row() -> None:
    assert first_slots(TURNED, [4, 4, 4])
    assert not first_slots([99.0, *TURNED[1:]], [4, 4, 4])
    assert not first_slots([8.0, 11, 0, 99, *TURNED[4:]], [4, 4, 4])
    assert first_slots([8.0, 11, 0, 99, *TURNED[4:]], [4, 3, 4])  # no more than the least has
    assert first_slots([99.0, *TURNED[1:]], [4, 0, 4])
    assert first_slots([99.0, *TURNED[1:]], [4, 4, 4], surplus=0)
    start = case_of(TURNED).start
    circular = shifted(start, Shift(kind="pack-circular", by=1))
    for other in (circular, cut_by(start, Cut(kind="pack-zigzag"))):
        assert first_slots([99.0, *TURNED[1:]], [4, 4, 4], other)


def test_of_what_ranks_hold_first_half_is_of_the_first_window() -> None:
    geometry = PackGeometry(cp_size=2, pad_multiple=4)
    moved = [8.0, 99, 1, 0, 4, 7, 11, 0, 2, 3, 5, 6]
    assert first_slots(moved, [2, 2, 2], cp=2, geometry=geometry)
    assert not first_slots([99.0, *moved[1:]], [2, 2, 2], cp=2, geometry=geometry)
    assert first_slots([99.0, *moved[1:]], [1, 2, 2], cp=2, geometry=geometry)


def test_rows_are_tried_some_at_a_time() -> None:
    for slots in (1, 4, 5, 100):
        case = case_of(TURNED, slots=slots)
        at = np.arange(2)
        assert _some_row_makes(case, case.start, at, np.array([8.0, 11]))
        assert _some_row_makes(case, case.start, at, np.array([1.0, 2]))
        assert not _some_row_makes(case, case.start, at, np.array([8.0, 12]))
        past = np.arange(4)  # past a row there is nothing
        assert _some_row_makes(case, case.start, past, np.array([8.0, 11, 0, 0]))
        assert not _some_row_makes(case, case.start, past, np.array([8.0, 11, 0, 4]))


def test_the_amount_is_compared_with_the_right_filling_alone() -> None:
    case = case_of(TURNED, surplus=3)
    start = case.start
    assert not _same_amount(case, start)
    for other in (
        shifted(start, Shift(by=1)),
        cut_by(start, Cut(kind="contiguous")),
        shifted(start, Shift(by=0), After(kind="rank", by=1)),
        replace(start, token="ones"),
        replace(start, sample=False),
    ):
        assert _same_amount(case, other)
    assert _same_amount(case_of(TURNED, surplus=0), start)
    assert _same_amount(case_of(TURNED), start)
    assert _same_amount(case_of(TURNED, surplus=3, layout=None), start)
    tailed = case_of([*TURNED, 0, 0, 0, 0], padded=[4, 4, 4, 4], surplus=3)
    assert not _same_amount(tailed, tailed.start)


def test_ranks_and_places_are_told_apart_by_what_they_are_multiplied_with() -> None:
    ahead, back = np.array([1, 2, 3, 4]), np.array([3, 4, 1, 2])
    assert _columns(ahead, 2).tolist() != _columns(back, 2).tolist()
    assert len(_columns(ahead, 2)) == 2
    assert _columns(ahead * 2, 2).tolist() == (_columns(ahead, 2) * 2).tolist()
    many = _multipliers(4096)
    assert len({*many.tolist()}) == 4096
    assert (many % 2 == 1).all()
    for bit in range(1, 64):
        assert 0.4 < ((many >> bit) & 1).mean() < 0.6, bit


def test_values_that_stand_for_nothing_are_zero_and_others_are_told_apart() -> None:
    case = case_of(TURNED, neutral=(0.0, 7.0))
    found = _bits(case, np.array([0.0, -0.0, 7.0, 1e-30, 2e-30, -1.0]))
    assert found[:3].tolist() == [0, 0, 0]
    assert len({*found[2:].tolist()}) == 4
    whole = np.array([0, 7, -5, 2**60])
    assert _bits(case, whole).tolist() == [0, 0, -5, 2**60]


def test_two_rows_may_be_exchanged_where_each_takes_its_own_room_and_first_ones_fail() -> None:
    # Rows of nothing look the same as what other rows begin with: several orders are tried.
    rows = [[0.0] * 8, [0.0, 0, 0, 0, 5, 9, 9, 9], ROWS[2]]
    moved = [0.0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 8, 11, 0, 0]
    case = case_of(moved, padded=[4, 8, 4], lengths=[3, 5, 2], rows=rows)
    built = permuted_and_laid_out(case, case.start)
    assert filled_with(built, case) == moved
    assert built is not None
    assert built.note == "the segments hold rows 1, 0, 2"
