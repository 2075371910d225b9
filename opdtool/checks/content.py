"""What fills a pack: token ids, targets, positions and every other token-aligned tensor.

Each tensor is a case of its own, judged by the same recipes as masks. Values are compared as
one integer a token. Other stacks fill padding as they like: ``input_ids`` and
``position_ids`` are compared on real tokens, ``target_ids`` where the slot has a real
successor, and every other tensor everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.hypotheses import Filled, PackCase
from opdtool.checks.masks import Count, neighbours, segment_blocks
from opdtool.checks.recipes import Bools, Ints, Placement, Trace, placed, trace
from opdtool.checks.recipes_values import Cells, Slots, Values
from opdtool.core.layout import PackedLayout
from opdtool.core.packing import fill_pieces, pack_positions

Kind = Literal["tokens", "targets", "positions", "strict"]
Run = Literal["restart", "pack", "rank"]
IGNORED = -100
"""The target that losses ignore."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContentFilled(Filled):
    """A packed tensor by its route; ``run`` says how positions run on."""

    run: Run = "restart"


@dataclass(slots=True, kw_only=True, eq=False)
class ContentCase(PackCase):
    """One dumped tensor. ``cells`` are the batch's tokens (None for positions); ``own_ids``
    the dump's input_ids, which say what its padding is filled with."""

    kind: Kind
    cells: Cells | None
    own_ids: Slots | None = None

    @property
    def shift(self) -> int:
        """How far ahead a slot looks."""
        return 1 if self.kind == "targets" else 0

    @property
    def right(self) -> ContentFilled | None:
        """The expected tensor."""
        return None if self.layout is None else self.filled(placed(self.layout))

    @property
    def start(self) -> ContentFilled:
        """The expected tensor, or one without rows where no layout fits."""
        none = PackedLayout.from_cu_seqlens([0], [0])
        return self.right or self.filled(placed(none))

    def filled(self, placement: Placement) -> ContentFilled:
        """The expected tensor but for where rows are placed."""
        return ContentFilled(route=self.route(placement, self.shift))

    def values(self, filled: ContentFilled, slots: Ints) -> Values:
        """One integer a slot."""
        return self._values(filled, trace(filled.route, slots), slots)

    def _values(self, filled: ContentFilled, at: Trace, slots: Ints) -> Values:
        if self.kind == "positions":
            if filled.run == "rank":
                return np.mod(slots, self.slots.total // len(self.slots.pieces))
            if filled.run == "pack":
                return np.add(filled.route.placement.offsets[at.segment], at.position)
            return at.source_position
        out = np.zeros(len(slots), dtype=np.int64)
        real = np.flatnonzero(at.real)
        assert self.cells is not None
        out[real] = self.cells.at(at.row[real], at.column[real])
        return out

    def agrees(self, filled: ContentFilled, slots: Ints, actual: Values) -> Bools:
        """Whether a filling makes what the dump holds, where that is compared at all."""
        at = trace(filled.route, slots)
        equal: Bools = np.equal(self._values(filled, at, slots), actual)
        if self.kind == "strict":
            return equal
        compared = self._compared(slots)
        if self.right is not None and _same_route(filled, self.right):
            rest = self._allowed(at, slots, actual) if self.kind == "targets" else ~compared
            return np.where(compared, equal, rest | equal)
        neutral = np.isin(actual, self.neutral) | equal
        free = ~compared
        if self.kind == "targets":
            neutral |= self._first_tokens(filled.route.placement, at) == actual
            if self.right is not None:
                free &= self._allowed(trace(self.right.route, slots), slots, actual)
        return np.where(self._exists(filled, at), equal, free | neutral)

    def _exists(self, filled: ContentFilled, at: Trace) -> Bools:
        """Whether the filling says what a slot holds."""
        if self.kind == "positions" and filled.run != "restart":
            return np.ones(len(at.real), np.bool_)
        return at.real

    def _compared(self, slots: Ints) -> Bools:
        """Whether the right filling says what a slot holds."""
        right = self.right
        if right is None:
            return np.ones(len(slots), np.bool_)
        return trace(right.route, slots).real

    def _allowed(self, at: Trace, slots: Ints, actual: Values) -> Bools:
        """Whether a target without a real successor is one of those that are all fine: 0,
        -100, the sequence's first token, or what the dump's own input_ids hold next."""
        right = self.right
        assert right is not None
        place = right.route.placement
        fine = (actual == 0) | (actual == IGNORED) | np.isin(actual, self.neutral)
        fine |= self._first_tokens(place, at) == actual
        if self.own_ids is not None and not fine.all():
            rest = np.flatnonzero(~fine)
            fine[rest] |= self._next_ids(place, at, rest) == actual[rest]
        return np.asarray(fine)

    def _first_tokens(self, place: Placement, at: Trace) -> Values:
        """The first token of the sequence in each slot's segment; 0 where there is none."""
        row = place.row[at.source_segment]
        out = np.zeros(len(row), dtype=np.int64)
        there = np.flatnonzero((row >= 0) & (place.length[at.source_segment] > 0))
        assert self.cells is not None
        out[there] = self.cells.at(row[there], np.zeros(len(there), dtype=np.int64))
        return out

    def _next_ids(self, place: Placement, at: Trace, which: Ints) -> Values:
        """What the dump's own input_ids hold in the next slot of the segment."""
        assert self.own_ids is not None
        segment = at.segment[which]
        width = np.diff(place.offsets)[segment]
        ahead = place.offsets[segment] + (at.position[which] + 1) % np.maximum(width, 1)
        if not self.whole:
            rank, local = place.layout.owners(torch.from_numpy(ahead))
            ahead = (rank * place.layout.local_total + local).numpy()
        order = np.argsort(ahead, kind="stable")
        out = np.empty(len(ahead), dtype=np.int64)
        out[order] = self.own_ids.take(ahead[order])
        return out


def _same_route(one: ContentFilled, other: ContentFilled) -> bool:
    """Whether two fillings are the same, the right one being made anew each time."""
    a, b = one.route, other.route
    return (
        one.run == other.run
        and a.shift == b.shift
        and a.after == b.after
        and a.cut == b.cut
        and a.placement.offsets is b.placement.offsets
        and all(
            np.array_equal(getattr(a.placement, part), getattr(b.placement, part))
            for part in ("row", "length", "lead", "stop")
        )
    )


@dataclass(slots=True, kw_only=True)
class ContentScan:
    """What one pass over a tensor found: slots that are wrong, targets without a successor
    that are none of those allowed, and padding filled in another way."""

    values: Count = field(default_factory=Count)
    fill: Count = field(default_factory=Count)
    padding: Count = field(default_factory=Count)
    wrong: list[Ints] = field(default_factory=list)
    total: int = 0


Expected = Callable[[PackedLayout, int], Tensor]
"""(part of the layout, rank) -> what the rank holds of it, [n, ...]."""


def scan_content(
    case: ContentCase, read_rows: Callable[[Ints | slice], Tensor] | None, token_size: int = 1
) -> ContentScan:
    """Compare a dumped tensor with the batch's, in blocks of whole sequences.

    Sets ``case.mismatches``, ``case.sample`` and what its padding is filled with.
    """
    scan = ContentScan(total=case.slots.total)
    layout = case.layout
    if layout is None:
        return scan
    room = case.room
    for start, stop in segment_blocks(
        layout, case.width, max(1, room.values // max(1, token_size))
    ):
        part = layout.part(start, stop)
        if max(part.total, case.width) * token_size > room.long or case.kind == "positions":
            _scan_slots(case, part, start, None, scan)
            continue
        assert read_rows is not None
        block = read_rows(neighbours(part.sequence_index))
        _scan_slots(case, part, start, block, scan)
    case.mismatches = scan.values.count + scan.fill.count
    return scan


def _scan_slots(
    case: ContentCase, part: PackedLayout, segment: int, block: Tensor | None, scan: ContentScan
) -> None:
    """Every rank's slots of a few segments: equal as a whole, or slot by slot."""
    layout = case.layout
    assert layout is not None
    size = layout.total if case.whole else layout.local_total
    base = int(layout.cu_seqlens_padded[segment]) if case.whole else layout.local_start(segment)
    cut = part.with_cp(1) if case.whole else part
    for rank in range(len(case.slots.pieces)):
        begin = rank * size + base
        if block is not None:
            _scan_rows(case, cut, rank, base, block, begin, scan)
            continue
        step = max(1, case.room.slots // case.slots.token_size)
        for first in range(0, cut.local_total, step):
            last = min(first + step, cut.local_total)
            if case.kind == "positions":
                expected = pack_positions(cut, cp_rank=rank, start=first, stop=last)
                actual = case.slots.pieces[rank](base + first, base + last)
                if torch.equal(expected, actual.to(torch.int64)):
                    continue
            _count(case, np.arange(begin + first, begin + last, dtype=np.int64), scan)


def _scan_rows(
    case: ContentCase,
    cut: PackedLayout,
    rank: int,
    base: int,
    block: Tensor,
    begin: int,
    scan: ContentScan,
) -> None:
    """One rank's slots of a few segments, beside what the batch's rows put there: only those
    that differ are looked at one by one, for the others agree whatever they are."""
    pieces = cut.pieces(rank, shift=-case.shift, limit=case.width)
    expected = fill_pieces(block, pieces, cut.local_total)
    actual = case.slots.pieces[rank](base, base + cut.local_total)
    if actual.dtype == expected.dtype and torch.equal(expected, actual):
        return
    step = max(1, case.room.slots // case.slots.token_size)
    for first in range(0, cut.local_total, step):
        sides = (one[first : first + step] for one in (expected, actual))
        wanted, found = map(case.slots.decode, sides)
        differ = np.flatnonzero(wanted != found)
        if len(differ):
            _count(case, begin + first + differ, scan, wanted[differ], found[differ])


def _count(
    case: ContentCase,
    slots: Ints,
    scan: ContentScan,
    wanted: Values | None = None,
    actual: Values | None = None,
) -> None:
    """Look at dump slots one by one; ``wanted`` are the tokens that the batch's rows put there,
    and ``actual`` what the dump holds, where they are known."""
    right = case.right
    assert right is not None
    at = trace(right.route, slots)
    if actual is None:
        actual = case.slots.take(slots)
    # Where no token goes, nothing is wanted, whatever a roll of the row would bring there.
    expected = case._values(right, at, slots) if wanted is None else np.where(at.real, wanted, 0)
    compared = np.ones(len(slots), np.bool_) if case.kind == "strict" else at.real
    agree: Bools = np.equal(expected, actual)
    rest = np.flatnonzero(~compared)
    if case.kind == "targets" and wanted is None:
        _roll_back(case, at, expected, actual)
    if case.kind == "targets" and len(rest):
        there = trace(right.route, slots[rest])
        agree[rest] |= case._allowed(there, slots[rest], actual[rest])
    elif len(rest):
        agree[rest] = True
    pack_slots = right.route.placement.offsets[at.segment] + at.position
    for count, counted in (
        (scan.values, ~agree & compared),
        (scan.fill, ~agree & ~compared),
        (scan.padding, agree & (expected != actual)),
    ):
        count.add(pack_slots[counted], expected[counted], actual[counted])
    bad = slots[~agree]
    if len(bad) and sum(map(len, scan.wrong)) < 1 << 16:
        scan.wrong.append(bad[:: max(1, len(bad) // 4096)])


def _roll_back(case: ContentCase, at: Trace, expected: Values, actual: Values) -> None:
    """Expect a sequence's first token in its segment's last slot too, where a roll brings it
    and it is there: it is no padding of another kind."""
    right = case.right
    assert right is not None
    place = right.route.placement
    last = ~at.real & (at.position == np.diff(place.offsets)[at.segment] - 1)
    rolled = last & (case._first_tokens(place, at) == actual)
    expected[rolled] = actual[rolled]


def common_fill(case: ContentCase) -> int | None:
    """The value that most of the dump's padding holds, where that is nearly all of it."""
    layout = case.layout
    if layout is None:
        return None
    starts = layout.cu_seqlens_padded[:-1] + layout.lengths
    padding = [
        np.arange(start, stop)[:64]
        for start, stop in zip(
            starts[:256].tolist(), layout.cu_seqlens_padded[1:257].tolist(), strict=True
        )
    ]
    at = np.concatenate([*padding, np.zeros(0, dtype=np.int64)]).astype(np.int64)
    if len(at) == 0:
        return None
    if not case.whole:
        rank, local = layout.owners(torch.from_numpy(at))
        at = (rank * layout.local_total + local).numpy()
    values, counts = np.unique(case.slots.take(np.sort(at)), return_counts=True)
    most = int(np.argmax(counts))
    return int(values[most]) if counts[most] >= 0.9 * len(at) else None
