"""Token ids, targets and positions of a short pack beside the batch, slot by slot by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.checks.content import (
    IGNORED,
    ContentCase,
    ContentFilled,
    ContentScan,
    Kind,
    _same_route,
    common_fill,
    scan_content,
)
from opdtool.checks.hypotheses import cut_by, placed_by, shifted
from opdtool.checks.masks import Count
from opdtool.checks.recipes import After, Cut, Ints, Shift, placed
from opdtool.checks.recipes_values import Cells, Slots, as_keys
from opdtool.checks.room import ROOM, Room
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from tests.checks.judging import MemoryBatch

IDS = [[11, 12, 13, 91, 92, 93], [21, 22, 94, 95, 96, 97]]
"""Rows of 3 and 2 real tokens, in 4 slots each; 4 slots more are a tail."""
NONE = [0] * 4
TOKENS = [11, 12, 13, 0, 21, 22, 0, 0, *NONE]
TARGETS = [12, 13, 0, 0, 22, 0, 0, 0, *NONE]
POSITIONS = [0, 1, 2, 3] * 3
ZIGZAG = [0, 3, 4, 7, 8, 11, 1, 2, 5, 6, 9, 10]
"""The slots that two ranks hold."""
RIGHT: dict[Kind, list[int]] = {
    "tokens": TOKENS,
    "strict": TOKENS,
    "targets": TARGETS,
    "positions": POSITIONS,
}
SMALL = replace(ROOM, values=1, slots=3)
"""One sequence at a time, three slots at a time."""
LONG = replace(ROOM, long=3, slots=2)
"""Every sequence is too long to be held."""


def slots_of(values: list[int], cp: int, room: Room) -> Slots:
    held = torch.tensor([values[i] for i in ZIGZAG] if cp == 2 else values)
    size = len(values) // cp
    pieces = [lambda a, b, r=r: held[r * size + a : r * size + b] for r in range(cp)]
    return Slots(pieces=pieces, sizes=[size] * cp, decode=as_keys, room=room)


def case_of(
    kind: Kind,
    values: list[int],
    *,
    cp: int = 1,
    room: Room = ROOM,
    own: list[int] | None = None,
    fits: bool = True,
    **more: Any,
) -> ContentCase:
    layout = PackedLayout.from_cu_seqlens(
        [0, 3, 5, 5], [0, 4, 8, 12], cp_size=cp, sequence_index=[0, 1]
    )
    batch = MemoryBatch({"input_ids": torch.tensor(IDS)}, np.array([3, 2]), 6)
    cells = Cells(batch=batch, name="input_ids", width=6, decode=as_keys)
    return ContentCase(
        slots=slots_of(values, cp, room),
        rows=np.array([0, 1]),
        lengths=np.array([3, 2]),
        width=6,
        layout=layout if fits else None,
        geometry=PackGeometry(cp_size=cp),
        whole=cp == 1,
        kind=kind,
        cells=None if kind == "positions" else cells,
        own_ids=None if own is None else slots_of(own, cp, room),
        **more,
    )


def rows(which: Ints | slice) -> Tensor:
    return torch.tensor(IDS)[which if isinstance(which, slice) else torch.from_numpy(which)]


def scanned(case: ContentCase) -> ContentScan:
    return scan_content(case, None if case.kind == "positions" else rows)


def slots_told(count: Count) -> list[tuple[int, float, float]]:
    return [(int(slot), int(expected), int(actual)) for slot, expected, actual in count.first]


def told(case: ContentCase) -> dict[str, list[tuple[int, float, float]]]:
    """The first slots of each count that is not empty; counts are held to them."""
    scan = scanned(case)
    found = {}
    for name in ("values", "fill", "padding"):
        count = getattr(scan, name)
        assert count.count == len(count.first)
        if count.count:
            found[name] = slots_told(count)
    assert scan.total == 12
    assert case.mismatches == scan.values.count + scan.fill.count
    assert sum(map(len, scan.wrong)) == case.mismatches
    assert all(map(len, scan.wrong))
    return found


WAYS = [(1, ROOM), (2, ROOM), (1, SMALL), (2, SMALL), (1, LONG), (2, LONG)]


def changed(values: list[int], **at: int) -> list[int]:
    """With other values at slots ``s0=...``."""
    return [at.get(f"s{i}", value) for i, value in enumerate(values)]


@pytest.mark.parametrize(("cp", "room"), WAYS)
@pytest.mark.parametrize("kind", ["tokens", "strict", "targets", "positions"])
def test_a_right_tensor_has_nothing_to_tell(kind: Kind, cp: int, room: Room) -> None:
    assert told(case_of(kind, RIGHT[kind], cp=cp, room=room)) == {}


@pytest.mark.parametrize(("cp", "room"), WAYS)
def test_tokens_are_held_to_the_batch_and_padding_only_told(cp: int, room: Room) -> None:
    dumped = changed(TOKENS, s1=99, s3=7, s5=0, s9=8)
    assert told(case_of("tokens", dumped, cp=cp, room=room)) == {
        "values": [(1, 12, 99), (5, 22, 0)],
        "padding": [(3, 0, 7), (9, 0, 8)],
    }
    assert told(case_of("strict", dumped, cp=cp, room=room)) == {
        "values": [(1, 12, 99), (3, 0, 7), (5, 22, 0), (9, 0, 8)]
    }


@pytest.mark.parametrize(("cp", "room"), WAYS)
def test_targets_without_a_successor_may_hold_what_says_nothing(cp: int, room: Room) -> None:
    fine = changed(TARGETS, s2=IGNORED, s3=11, s5=21, s6=IGNORED, s8=IGNORED)
    assert told(case_of("targets", fine, cp=cp, room=room)) == {
        "padding": [(2, 0, -100), (5, 0, 21), (6, 0, -100), (8, 0, -100)]
    }  # in the last slot of a segment a roll brings the first token itself
    wrong = changed(TARGETS, s0=99, s2=21, s3=12, s9=11, s11=-1)
    assert told(case_of("targets", wrong, cp=cp, room=room)) == {
        "values": [(0, 12, 99)],
        "fill": [(2, 0, 21), (3, 0, 12), (9, 0, 11), (11, 0, -1)],
    }
    neutral = case_of("targets", wrong, cp=cp, room=room, neutral=(0.0, 21.0, -1.0))
    assert told(neutral)["fill"] == [(3, 0, 12), (9, 0, 11)]


@pytest.mark.parametrize(("cp", "room"), WAYS)
def test_targets_may_hold_what_the_dumps_own_ids_hold_next(cp: int, room: Room) -> None:
    own = changed(TOKENS, s3=31, s6=32, s7=33, s8=34, s10=35)
    # Slot t may hold what slot t + 1 of its segment holds, the last slot what the first does.
    dumped = changed(TARGETS, s2=31, s5=32, s6=33, s11=34, s9=35)
    case = case_of("targets", dumped, cp=cp, room=room, own=own)
    assert list(told(case)) == ["padding"]
    other = changed(TARGETS, s3=31, s7=33, s10=34)
    case = case_of("targets", other, cp=cp, room=room, own=own)
    assert told(case) == {"fill": [(3, 0, 31), (7, 0, 33), (10, 0, 34)]}


@pytest.mark.parametrize(("cp", "room"), WAYS)
def test_positions_are_held_to_their_sequences_on_real_tokens(cp: int, room: Room) -> None:
    dumped = changed(POSITIONS, s2=0, s3=9, s4=1, s11=7)
    assert told(case_of("positions", dumped, cp=cp, room=room)) == {
        "values": [(2, 2, 0), (4, 0, 1)],
        "padding": [(3, 3, 9), (11, 3, 7)],
    }


def test_a_tensor_of_another_dtype_is_compared_by_its_values() -> None:
    case = case_of("tokens", TOKENS)
    held = torch.tensor(TOKENS, dtype=torch.int32)
    case.slots = Slots(pieces=[lambda a, b: held[a:b]], sizes=[12], decode=as_keys)
    assert told(case) == {}


@pytest.mark.parametrize(("cp", "room"), WAYS)
def test_tokens_that_look_like_positions_are_tokens_all_the_same(cp: int, room: Room) -> None:
    wrong = [(0, 11, 0), (1, 12, 1), (2, 13, 2), (4, 21, 0), (5, 22, 1)]
    assert told(case_of("tokens", POSITIONS, cp=cp, room=room))["values"] == wrong


def test_a_row_of_one_token_has_a_first_token() -> None:
    case = case_of("targets", changed(TARGETS, s0=11, s1=11))
    case.layout = PackedLayout.from_cu_seqlens([0, 1, 3], [0, 4, 12], sequence_index=[0, 1])
    assert case.agrees(case.start, np.array([0, 1]), np.array([11, 12])).tolist() == [True, False]


def test_wide_tokens_are_read_in_smaller_blocks() -> None:
    asked: list[object] = []

    def counted(which: Ints | slice) -> Tensor:
        asked.append(which)
        return rows(which)

    room = replace(ROOM, values=18, long=48)
    case = case_of("tokens", TOKENS, room=room)
    scan_content(case, counted, token_size=1)
    assert len(asked) == 1
    scan_content(case, counted, token_size=4)
    assert len(asked) == 1 + 3
    before = len(asked)
    scan_content(case, counted, token_size=9)  # a sequence of 6 columns is too long by then
    assert len(asked) == before


def test_nothing_is_compared_where_no_layout_fits() -> None:
    case = case_of("tokens", TOKENS, fits=False)
    scan = scanned(case)
    assert (scan.total, scan.values.count, case.mismatches) == (12, 0, 0)
    assert case.right is None
    assert case.start.route.placement.layout.total == 0
    assert case.start.route.placement.layout.num_segments == 0


def made(case: ContentCase, filled: ContentFilled) -> list[int]:
    found: list[int] = case.values(filled, np.arange(12)).tolist()
    return found


def test_what_each_kind_of_tensor_should_hold() -> None:
    for kind, values in RIGHT.items():
        case = case_of(kind, values)
        assert made(case, case.start) == values
        assert case.shift == (1 if kind == "targets" else 0)
    ranks = case_of("positions", POSITIONS, cp=2)
    on = [POSITIONS[i] for i in ZIGZAG]
    assert made(ranks, ranks.start) == on
    assert made(ranks, replace(ranks.start, run="pack")) == ZIGZAG
    assert made(ranks, replace(ranks.start, run="rank")) == [0, 1, 2, 3, 4, 5] * 2
    assert case_of("tokens", TOKENS).start.run == "restart"


def agreed(case: ContentCase, filled: ContentFilled, dumped: list[int]) -> str:
    """A letter a slot: y where the filling makes what was dumped."""
    held = [dumped[i] for i in ZIGZAG] if not case.whole else dumped
    agree = case.agrees(filled, np.arange(12), np.array(held))
    return "".join("y" if one else "." for one in agree)


def test_the_right_filling_agrees_with_any_padding_unless_it_is_strict() -> None:
    dumped = changed(TOKENS, s1=99, s3=7, s9=8)
    tokens, strict = case_of("tokens", dumped), case_of("strict", dumped)
    assert agreed(tokens, tokens.start, dumped) == "y.yyyyyyyyyy"
    assert agreed(strict, strict.start, dumped) == "y.y.yyyyy.yy"
    positions = case_of("positions", POSITIONS)
    other = changed(POSITIONS, s2=0, s3=9)
    assert agreed(positions, positions.start, other) == "yy.yyyyyyyyy"


def test_right_targets_agree_where_they_say_nothing() -> None:
    dumped = changed(TARGETS, s0=99, s2=-100, s3=11, s5=12, s9=5)
    case = case_of("targets", dumped)
    assert agreed(case, case.start, dumped) == ".yyyy.yyy.yy"


def test_another_filling_must_make_its_tokens_and_is_free_where_none_were_compared() -> None:
    dumped = [12, 13, 7, 8, 22, 9, 0, 0, 0, 0, 0, 0]  # shifted by one, and filled up
    case = case_of("tokens", dumped)
    moved = shifted(case.start, Shift(by=1))
    # Slots 2 and 5 should hold 13 and 22, so that 7 and 9 there are not explained.
    assert agreed(case, moved, dumped) == "yy.yy.yyyyyy"
    case.neutral = (0.0, 7.0, 9.0)
    assert agreed(case, moved, dumped) == "y" * 12
    back = shifted(case.start, Shift(by=-1))
    assert agreed(case, back, [0, 11, 12, 13, 5, 21, 22, 6, *NONE]) == "yyyy.yyyyyyy"
    assert agreed(case, back, [0, 11, 12, 99, 0, 21, 99, 6, *NONE]) == "yyy.yy.yyyyy"


def test_another_filling_of_targets_is_held_to_what_they_may_hold() -> None:
    case = case_of("targets", TARGETS)
    plain = shifted(case.start, Shift(by=0))
    dumped = [11, 12, 13, 0, 21, 22, 0, 0, *NONE]
    assert agreed(case, plain, dumped) == "y" * 12
    # Past its rows: the first token, 0 and -100 say nothing, another token does.
    assert agreed(case, plain, changed(dumped, s3=11, s6=-100, s7=21)) == "y" * 12
    assert agreed(case, plain, changed(dumped, s3=12, s6=5, s9=11)) == "yyy.yy.yy.yy"
    twice = shifted(case.start, Shift(by=2))
    assert agreed(case, twice, [13, 0, 0, 0, 0, 0, 0, 0, *NONE]) == "y" * 12
    # Slot 1 has a successor: what is there must come from somewhere, the first token may.
    assert agreed(case, twice, [13, 11, 0, 0, 21, 0, 0, 0, *NONE]) == "y" * 12
    assert agreed(case, twice, [13, 12, 0, 0, 22, 0, 0, 0, *NONE]) == "y.yy.yyyyyyy"


def test_where_no_layout_fits_every_slot_of_a_filling_is_compared() -> None:
    case = case_of("tokens", TOKENS, fits=False)
    fitting = case_of("tokens", TOKENS)
    assert fitting.layout is not None
    filled = placed_by(case.start, placed(fitting.layout))
    assert agreed(case, filled, TOKENS) == "y" * 12
    assert agreed(case, filled, changed(TOKENS, s1=0, s3=7)) == "y.y." + "y" * 8
    targets = case_of("targets", TARGETS, fits=False)
    assert agreed(targets, placed_by(targets.start, placed(fitting.layout)), TARGETS) == "y" * 12


def test_positions_that_run_on_say_what_every_slot_holds() -> None:
    case = case_of("positions", list(range(12)))
    on = replace(case.start, run="pack")
    assert agreed(case, on, list(range(12))) == "y" * 12
    assert agreed(case, on, changed(list(range(12)), s3=0, s10=0)) == "yyy.yyyyyy.y"


def test_only_the_very_same_filling_is_the_right_one() -> None:
    dumped = changed(TARGETS, s3=12)
    case = case_of("targets", dumped, cp=2)
    right = case.start
    assert case.layout is not None
    length = np.array([3, 2, 0])
    same = placed_by(right, placed(case.layout, length=length))
    others = [
        cut_by(right, Cut(kind="zigzag", order=(0, 1))),
        shifted(right, Shift(kind="segment-circular", by=1)),
        shifted(right, Shift(by=1), After(kind="none", by=1)),
        placed_by(right, placed(case.layout, lead=np.array([0, 0, 1]))),
        placed_by(right, placed(case.layout, stop=np.array([4, 4, 3]))),
        placed_by(right, placed(case.layout, row=np.array([0, 1, 1]))),
        placed_by(right, placed(case.layout, length=np.array([3, 2, 1]))),
    ]
    assert _same_route(same, right)
    assert _same_route(case.filled(placed(case.layout)), right)
    assert not any(_same_route(other, right) for other in others)
    assert not _same_route(replace(right, run="pack"), right)
    elsewhere = case_of("targets", dumped, cp=2)
    assert not _same_route(elsewhere.start, right)


def test_the_value_that_nearly_all_padding_holds_is_told() -> None:
    def fill(values: list[int], cp: int = 1) -> int | None:
        return common_fill(case_of("tokens", values, cp=cp))

    sevens = [7 if i in (3, 6, 7, 8, 9, 10, 11) else value for i, value in enumerate(TOKENS)]
    assert fill(TOKENS) == 0
    assert fill(sevens) == 7
    assert fill(sevens, cp=2) == 7
    assert fill(changed(sevens, s3=5)) is None  # six of seven are too few
    assert common_fill(case_of("tokens", sevens, fits=False)) is None
    full = case_of("tokens", TOKENS)
    full.layout = PackedLayout.from_cu_seqlens([0, 4, 12], [0, 4, 12])
    assert common_fill(full) is None


def test_nine_of_ten_are_nearly_all_and_only_the_first_of_long_padding_are_looked_at() -> None:
    layout = PackedLayout.from_cu_seqlens([0, 0], [0, 10])
    ten = case_of("tokens", [7] * 9 + [5])
    ten.layout = layout
    assert common_fill(ten) == 7
    less = case_of("tokens", [7] * 8 + [5, 5])
    less.layout = layout
    assert common_fill(less) is None
    long = case_of("tokens", [7] * 64 + [5] * 64)
    long.layout = PackedLayout.from_cu_seqlens([0, 0], [0, 128])
    assert common_fill(long) == 7
    edge = case_of("tokens", [7] * 58 + [5] * 70)  # 58 of 64, not of 65
    edge.layout = long.layout
    assert common_fill(edge) == 7
    assert ContentScan().total == 0
    many = case_of("tokens", [7] * 256 + [5] * 256)
    many.layout = PackedLayout.from_cu_seqlens([0] * 513, list(range(513)))
    assert common_fill(many) == 7
