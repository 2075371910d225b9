"""Where each slot of a pack is filled from, worked out by hand on two short sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opdtool.checks.recipes import (
    After,
    AfterKind,
    Cut,
    CutKind,
    Placement,
    Recipe,
    Shift,
    ShiftKind,
    find_segments,
    placed,
    placed_unpadded,
    segment_rows,
    trace,
    uncut,
)
from opdtool.core.layout import PackedLayout

OUT = None
"""A slot that nothing fills."""


def layout_of(
    lengths: list[int], padded: list[int], *, cp: int = 1, rows: list[int] | None = None
) -> PackedLayout:
    return PackedLayout.from_cu_seqlens(
        [0, *np.cumsum(lengths).tolist()],
        [0, *np.cumsum(padded).tolist()],
        cp_size=cp,
        sequence_index=rows,
    )


PLAIN = layout_of([3, 5], [4, 8], rows=[7, 9])
"""Rows 7 (abc) and 9 (defgh) in 4 and 8 slots: a b c . d e f g h . . ."""
TAILED = layout_of([3, 2, 0], [4, 4, 4], rows=[7, 9])
"""Two rows and a tail segment that holds none."""


def recipe(
    place: Placement,
    *,
    by: int = 0,
    kind: ShiftKind = "segment",
    cut: Cut = Cut(kind="whole"),  # noqa: B008
    after: After = After(),  # noqa: B008
) -> Recipe:
    return Recipe(placement=place, shift=Shift(kind=kind, by=by), cut=cut, after=after)


def sources(made: Recipe, slots: Any = None) -> list[Any]:
    """(row, column) behind each slot, None where nothing is; dead places are (0, 0)."""
    total = made.placement.layout.total
    at = trace(made, np.arange(total) if slots is None else np.asarray(slots))
    assert not at.row[~at.real].any()
    assert not at.column[~at.real].any()
    assert not (at.real & ~at.alive).any()
    found = zip(at.row.tolist(), at.column.tolist(), at.real.tolist(), strict=True)
    return [(row, column) if real else OUT for row, column, real in found]


def letters(text: str) -> list[Any]:
    """'ab.' as sources: abc are columns 0.. of row 7, defgh those of row 9, . is nothing."""
    known = {letter: (7, i) for i, letter in enumerate("abc")}
    known |= {letter: (9, i) for i, letter in enumerate("defgh")}
    return [known.get(letter, OUT) for letter in text.replace(" ", "")]


def test_segments_past_the_rows_hold_no_row() -> None:
    assert segment_rows(TAILED).tolist() == [7, 9, -1]
    assert segment_rows(PLAIN).tolist() == [7, 9]


def test_rows_are_placed_at_the_padded_offsets_and_each_part_can_be_replaced() -> None:
    place = placed(TAILED)
    assert place.offsets.tolist() == [0, 4, 8, 12]
    assert place.row.tolist() == [7, 9, -1]
    assert place.length.tolist() == [3, 2, 0]
    assert place.lead.tolist() == [0, 0, 0]
    assert place.stop.tolist() == [4, 4, 4]
    other = np.array([1, 2, 3])
    for part in ("length", "lead", "row", "stop"):
        changed = placed(TAILED, **{part: other})
        for name in ("length", "lead", "row", "stop"):
            expected = other if name == part else getattr(place, name)
            assert getattr(changed, name).tolist() == expected.tolist()


def test_unpadded_rows_lie_end_to_end_with_nothing_after_them() -> None:
    place = placed_unpadded(TAILED)
    assert place.offsets.tolist() == [0, 3, 5, 5, 12]
    assert place.row.tolist() == [7, 9, -1, -1]
    assert place.length.tolist() == [3, 2, 0, 0]
    assert place.lead.tolist() == [0, 0, 0, 0]
    assert place.stop.tolist() == [3, 2, 0, 0]
    assert sources(recipe(placed_unpadded(PLAIN))) == letters("abcdefgh....")


def test_the_segment_of_a_slot_is_found_for_few_and_for_many_in_any_order() -> None:
    offsets = np.array([0, 4, 4, 6])  # the second segment is empty
    slots = [0, 3, 4, 5, 6, 9]
    expected = [0, 0, 2, 2, 3, 3]
    assert find_segments(offsets, np.array(slots)).tolist() == expected
    many, at = np.repeat(slots, 4), np.repeat(expected, 4)
    assert len(many) > 4 * len(offsets)
    assert find_segments(offsets, many).tolist() == at.tolist()
    mixed = np.random.default_rng(0).permutation(len(many))
    assert find_segments(offsets, many[mixed]).tolist() == at[mixed].tolist()
    few_mixed = np.array([5, 0, 4])
    assert find_segments(offsets, few_mixed).tolist() == [2, 0, 2]
    later = np.array([3, 5])
    assert find_segments(later, np.arange(12)).tolist() == [-1] * 3 + [0] * 2 + [1] * 7


CUTS: list[tuple[CutKind, int, list[int]]] = [
    ("zigzag", 2, [0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]),
    ("contiguous", 2, [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]),
    ("pack-zigzag", 2, [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]),
    ("pack-contiguous", 2, list(range(12))),
    ("zigzag", 1, list(range(12))),
    ("whole", 2, list(range(12))),
    ("zigzag", 3, [0, 5, 6, 7, 16, 17, 1, 4, 8, 9, 14, 15, 2, 3, 10, 11, 12, 13]),
    ("contiguous", 3, [0, 1, 6, 7, 8, 9, 2, 3, 10, 11, 12, 13, 4, 5, 14, 15, 16, 17]),
    ("pack-zigzag", 3, [0, 1, 2, 15, 16, 17, 3, 4, 5, 12, 13, 14, *range(6, 12)]),
    ("pack-contiguous", 3, list(range(18))),
    (
        "zigzag",
        4,
        [
            *(0, 7, 8, 9, 10, 29, 30, 31),
            *(1, 6, 11, 12, 13, 26, 27, 28),
            *(2, 5, 14, 15, 16, 23, 24, 25),
            *(3, 4, 17, 18, 19, 20, 21, 22),
        ],
    ),
    (
        "pack-zigzag",
        4,
        [
            *(0, 1, 2, 3, 28, 29, 30, 31),
            *(4, 5, 6, 7, 24, 25, 26, 27),
            *(8, 9, 10, 11, 20, 21, 22, 23),
            *(12, 13, 14, 15, 16, 17, 18, 19),
        ],
    ),
]


@pytest.mark.parametrize(("kind", "cp", "expected"), CUTS)
def test_each_cut_gives_each_rank_its_slots(kind: CutKind, cp: int, expected: list[int]) -> None:
    padded = {3: [6, 12], 4: [8, 24]}.get(cp, [4, 8])
    layout = layout_of([3, 5], padded, cp=cp)
    slots = np.arange(layout.total)
    assert uncut(layout, Cut(kind=kind), slots).tolist() == expected
    one = 7  # a slot by itself
    assert uncut(layout, Cut(kind=kind), slots[one : one + 1]).tolist() == [expected[one]]
    if cp > 1 and kind != "whole":
        order = tuple(range(cp))[::-1]
        size = layout.local_total
        swapped = [expected[rank * size + i] for rank in order for i in range(size)]
        assert uncut(layout, Cut(kind=kind, order=order), slots).tolist() == swapped


def test_an_empty_pack_is_traced() -> None:
    none = PackedLayout.from_cu_seqlens([0], [0])
    for kind in ("segment", "segment-circular", "pack-circular"):
        assert sources(recipe(placed(none), by=1, kind=kind)) == []
    cut = PackedLayout.from_cu_seqlens([0], [0], cp_size=2)
    kinds: tuple[AfterKind, ...] = ("segment", "segment-circular", "rank", "rank-circular")
    for after in kinds:
        with np.errstate(all="raise"):
            late = recipe(placed(cut), cut=Cut(kind="zigzag"), after=After(kind=after, by=1))
            assert sources(late) == []


SHIFTS: list[tuple[ShiftKind, int, str]] = [
    ("segment", 0, "abc. defgh..."),
    ("segment", 1, "bc.. efgh...."),
    ("segment", 2, "c... fgh....."),
    ("segment", -1, ".abc .defgh.."),
    ("segment", 4, ".... h......."),
    ("segment-circular", 1, "bc.a efgh...d"),
    ("segment-circular", -1, ".abc .defgh.."),
    ("segment-circular", -2, "c.ab ..defgh."),
    ("segment-circular", 8, "abc. defgh..."),
    ("pack-circular", 0, "abc. defgh..."),
    ("pack-circular", 1, "bc.d efgh...a"),
    ("pack-circular", -1, ".abc .defgh.."),
    ("pack-circular", 5, "efgh ...abc.d"),
]


@pytest.mark.parametrize(("kind", "by", "expected"), SHIFTS)
def test_a_slot_speaks_of_the_slot_ahead(kind: ShiftKind, by: int, expected: str) -> None:
    assert sources(recipe(placed(PLAIN), by=by, kind=kind)) == letters(expected)


def test_a_trace_tells_the_slots_own_place_and_its_source() -> None:
    at = trace(recipe(placed(PLAIN), by=1), np.arange(12))
    assert at.segment.tolist() == [0] * 4 + [1] * 8
    assert at.position.tolist() == [0, 1, 2, 3, *range(8)]
    assert at.source_segment.tolist() == at.segment.tolist()
    assert at.source_position.tolist() == [1, 2, 3, 3, 1, 2, 3, 4, 5, 6, 7, 7]
    assert at.alive.all()
    back = trace(recipe(placed(PLAIN), by=-1), np.arange(12))
    assert back.source_position.tolist() == [0, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6]
    over = trace(recipe(placed(PLAIN), by=1, kind="pack-circular"), np.array([3, 11]))
    assert over.segment.tolist() == [0, 1]
    assert over.source_segment.tolist() == [1, 0]
    assert over.source_position.tolist() == [0, 0]


def test_rows_may_lie_ahead_of_nothing_end_early_and_be_of_other_lengths() -> None:
    aligned = placed(PLAIN, lead=np.array([1, 3]))
    assert sources(recipe(aligned)) == letters(".abc ...defgh")
    assert sources(recipe(aligned, by=1)) == letters("abc. ..defgh.")
    assert sources(recipe(placed(PLAIN, stop=np.array([2, 1])))) == letters("ab.. d.......")
    assert sources(recipe(placed(PLAIN, length=np.array([1, 4])))) == letters("a... defg....")
    other = placed(PLAIN, row=np.array([9, -1]))
    assert sources(recipe(other))[:4] == letters("def.")
    assert sources(recipe(other))[4:] == [OUT] * 8
    first = placed(PLAIN, row=np.array([0, 9]))
    assert sources(recipe(first))[:2] == [(0, 0), (0, 1)]
    ahead = placed(PLAIN, lead=np.array([-1, 0]))  # the row began before its segment
    assert sources(recipe(ahead))[:4] == letters("bc..")


CUT = layout_of([3, 5], [4, 8], cp=2, rows=[7, 9])
"""Rank 0: a .  d e . .   rank 1: b c  f g h ."""
LATE: list[tuple[AfterKind, int, str]] = [
    ("none", 1, "a.de.. bcfgh."),
    ("segment", 1, "..e... c.gh.."),
    ("segment", 2, "...... ..h..."),
    ("segment", -1, ".a.de. .b.fgh"),
    ("segment-circular", 1, ".ae..d cbgh.f"),
    ("segment-circular", -1, ".a.de. cb.fgh"),
    ("rank", 1, ".de... cfgh.."),
    ("rank", -1, ".a.de. .bcfgh"),
    ("rank-circular", 1, ".de..a cfgh.b"),
    ("rank-circular", -1, ".a.de. .bcfgh"),
    ("rank-circular", 2, "de..a. fgh.bc"),
]


@pytest.mark.parametrize(("kind", "by", "expected"), LATE)
def test_a_roll_after_the_cut_moves_what_a_rank_holds(
    kind: AfterKind, by: int, expected: str
) -> None:
    made = recipe(placed(CUT), cut=Cut(kind="zigzag"), after=After(kind=kind, by=by))
    assert sources(made) == letters(expected)


def test_there_is_no_late_roll_unless_it_is_asked_for() -> None:
    made = Recipe(placement=placed(CUT), shift=Shift(by=0), cut=Cut(kind="zigzag"))
    assert (made.after.kind, made.after.by) == ("none", 0)
    assert Shift(by=1).kind == "segment"


def test_a_late_roll_that_is_not_circular_leaves_dead_slots_at_the_edge() -> None:
    made = recipe(placed(CUT), cut=Cut(kind="zigzag"), after=After(kind="segment", by=1))
    dead = np.flatnonzero(~trace(made, np.arange(12)).alive)
    assert dead.tolist() == [1, 5, 7, 11]
    made = replace(made, after=After(kind="rank", by=-1))
    assert np.flatnonzero(~trace(made, np.arange(12)).alive).tolist() == [0, 6]
    made = replace(made, after=After(kind="rank-circular", by=-1))
    assert trace(made, np.arange(12)).alive.all()


def test_a_late_roll_of_a_whole_pack_is_over_all_its_slots() -> None:
    def rolled(kind: AfterKind, by: int) -> list[Any]:
        return sources(recipe(placed(CUT), after=After(kind=kind, by=by)))

    assert rolled("segment", 1) == letters("bc.. efgh....")
    assert rolled("segment-circular", 1) == letters("bc.a efgh...d")
    assert rolled("rank-circular", 1) == letters("bc.d efgh...a")
    assert rolled("rank", 8) == letters("h... ........")


def test_a_shift_a_cut_and_an_order_of_ranks_are_made_together() -> None:
    made = recipe(placed(CUT), by=1, cut=Cut(kind="zigzag", order=(1, 0)))
    assert sources(made) == letters("c.gh.. b.ef..")
    assert sources(made, [7, 6, 2]) == letters(".bg")
