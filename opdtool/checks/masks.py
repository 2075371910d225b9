"""Checks of a dumped draft-loss mask: one pass over it, then the findings.

A mask that passes is read once, in blocks of whole sequences, and so are the batch's masks.
Only blocks that differ are looked at slot by slot. Legend: B batch rows, S row width, T packed
slots, N how far the mask is shifted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.hypotheses import MaskCase, close
from opdtool.checks.masks_sample import sample_slots
from opdtool.checks.recipes import Bools, Cut, Ints, find_segments, uncut
from opdtool.checks.recipes_values import Floats, as_numbers
from opdtool.checks.room import ROOM
from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.packing import fill_pieces
from opdtool.findings import MAX_PLACES

MOST_WEIGHTS = 4096
"""More distinct weights than this are not remembered: any finite weight may be right then."""
MOST_SAMPLED = 1 << 16


class NotFiniteError(InputError):
    """A mask of the batch's with a weight that is not finite; whoever knows the file adds it."""

    def __init__(self, tensor: str, row: int) -> None:
        super().__init__(
            f"{tensor} has a value that is not finite in row {row}; a mask holds finite weights, "
            "0 to leave a token out"
        )
        self.tensor, self.row = tensor, row


@dataclass(slots=True)
class Count:
    """How many slots break one rule, and the first of them: (pack slot, expected, actual)."""

    count: int = 0
    first: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, slots: Ints, expected: Floats, actual: Floats) -> None:
        """More slots of the pack, with what they should hold and what they do."""
        self.count += len(slots)
        ascending = bool((slots[1:] >= slots[:-1]).all())
        order = slice(MAX_PLACES) if ascending else np.argsort(slots, kind="stable")[:MAX_PLACES]
        more = zip(
            slots[order].tolist(), expected[order].tolist(), actual[order].tolist(), strict=True
        )
        self.first = sorted([*self.first, *more], key=lambda place: place[0])[:MAX_PLACES]


@dataclass(slots=True, kw_only=True)
class MaskScan:
    """What one pass over a pack's mask found."""

    values: Count = field(default_factory=Count)
    finite: Count = field(default_factory=Count)
    range: Count = field(default_factory=Count)
    padding: Count = field(default_factory=Count)
    last: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)
    odd: dict[float, Count] = field(default_factory=dict)
    """By value, slots that hold neither 0 nor 1: a weight of the batch, or none."""
    any_nonzero: bool = False
    all_one: bool = True
    empty_rows: list[int] = field(default_factory=list)
    wrong: list[Ints] = field(default_factory=list)
    """Dump slots of mismatches, thinned out."""
    surplus: int = 0
    """How many slots more than there should be hold something other than zero."""
    total: int = 0


def scan_mask(case: MaskCase) -> MaskScan:
    """Compare a dumped mask with the batch's, and look at it by itself.

    Sets ``case.mismatches`` and ``case.sample``.

    Raises:
        NotFiniteError: the batch's own masks are not finite.
    """
    scan = MaskScan(total=case.slots.total)
    if case.layout is None:
        _scan_alone(case, scan)
        return scan
    layout = case.layout
    for start, stop in segment_blocks(layout, case.width, case.room.values):
        part = layout.part(start, stop)
        if max(part.total, case.width) > case.room.long:
            _scan_long(case, start, scan)
            continue
        weights = _weights(case, part.sequence_index)
        _empty_rows(case, part, weights, scan)
        for rank in range(len(case.slots.pieces)):
            _scan_piece(case, part, start, rank, weights, scan)
    scan.range = _out_of_range(case, scan)
    case.mismatches, case.surplus = scan.values.count, scan.surplus
    if case.mismatches:
        case.sample = sample_slots(case.slots.total, scan.wrong)
    scan.wrong.clear()
    return scan


def segment_blocks(
    layout: PackedLayout, width: int, block: int = ROOM.values
) -> Iterator[tuple[int, int]]:
    """Segments [start, stop) of at most ``block`` slots or batch values, or one alone."""
    size = np.cumsum(np.maximum(layout.padded_lengths, width))
    start, done = 0, 0
    while start < layout.num_segments:
        stop = int(np.searchsorted(size, done + block, side="right"))
        stop = max(stop, start + 1)
        yield start, stop
        start, done = stop, int(size[stop - 1])


def _weights(case: MaskCase, rows: Ints, columns: slice | None = None) -> Tensor:
    """token_mask times sample_mask of some rows, [k, S] in the dtype of their product."""
    tokens = case.weights.tokens
    block = tokens.batch.read(tokens.name, neighbours(rows), columns)
    if block.is_floating_point() and not _finite(block):
        bad = int((~torch.isfinite(block)).any(dim=1).nonzero()[0])
        raise NotFiniteError(tokens.name, int(rows[bad]))
    if case.weights.given is not None:
        block = block * case.weights.given[torch.from_numpy(rows)].unsqueeze(-1)
    return block


def _finite(values: Tensor) -> bool:
    """Whether all values are finite: so is their sum then, unless it overflows."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def neighbours(rows: Ints) -> Any:
    """A slice for rows that follow each other, so that they are read in one go."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _empty_rows(case: MaskCase, part: PackedLayout, weights: Tensor, scan: MaskScan) -> None:
    """Kept rows without a trained token."""
    rows = part.sequence_index
    if len(rows) == 0 or len(scan.empty_rows) > MAX_PLACES:
        return
    columns = torch.arange(case.width)
    trained = (weights != 0) & (columns >= case.shift)
    trained &= columns < torch.from_numpy(part.lengths[: len(rows)]).unsqueeze(-1)
    empty = ~trained.any(dim=1).numpy() & (case.weights.sample[rows] != 0)
    scan.empty_rows.extend(rows[empty].tolist())


def _scan_piece(
    case: MaskCase,
    part: PackedLayout,
    segment: int,
    rank: int,
    weights: Tensor,
    scan: MaskScan,
) -> None:
    """One rank's slots of a few segments: equal as a whole, or slot by slot."""
    layout = case.layout
    assert layout is not None
    if case.whole:
        part, base = part.with_cp(1), int(layout.cu_seqlens_padded[segment])
    else:
        base = layout.local_start(segment)
    pieces = part.pieces(rank, shift=-case.shift, limit=case.width)
    pieces = pieces.clip(case.shift, part.total + case.shift + 1)
    expected = fill_pieces(weights, pieces, part.local_total)
    actual = case.slots.pieces[rank](base, base + part.local_total)
    if not scan.any_nonzero:
        scan.any_nonzero = bool(actual.to(torch.bool).any())
    if scan.all_one:
        scan.all_one = bool((actual == 1).all())
    expected, actual = comparable(expected, actual)
    if torch.equal(expected, actual):
        return
    first = rank * (0 if case.whole else layout.local_total) + base
    for start in range(0, part.local_total, case.room.slots):
        stop = min(start + case.room.slots, part.local_total)
        if torch.equal(expected[start:stop], actual[start:stop]):
            continue
        wanted, found = (one[start:stop].double().numpy() for one in (expected, actual))
        scan.surplus += int(np.count_nonzero(found)) - int(np.count_nonzero(wanted))
        bad = np.flatnonzero(~close(wanted, found, case.atol))
        if len(bad):
            _count(case, layout, first + start + bad, wanted[bad], found[bad], scan)


def _scan_long(case: MaskCase, segment: int, scan: MaskScan) -> None:
    """One sequence too long to be held: its slots by recipe, a piece at a time."""
    layout, right = case.layout, case.right
    assert layout is not None
    assert right is not None
    offsets = layout.cu_seqlens_padded[segment : segment + 2]
    size = layout.total if case.whole else layout.local_total
    first, last = (offsets if case.whole else offsets // layout.cp_size).tolist()
    trained = False
    for rank in range(len(case.slots.pieces)):
        for start in range(first, last, case.room.slots):
            stop = min(start + case.room.slots, last)
            slots = rank * size + np.arange(start, stop, dtype=np.int64)
            wanted = np.asarray(case.values(right, slots), dtype=np.float64)
            found = case.slots.pieces[rank](start, stop).double().numpy()
            trained |= bool(wanted.any())
            scan.any_nonzero |= bool(found.any())
            scan.all_one &= bool((found == 1).all())
            scan.surplus += int(np.count_nonzero(found)) - int(np.count_nonzero(wanted))
            bad = np.flatnonzero(~close(wanted, found, case.atol))
            if len(bad):
                _count(case, layout, slots[bad], wanted[bad], found[bad], scan)
    row = layout.row_of(segment)
    if row is not None and not trained and case.weights.sample[row] != 0:
        scan.empty_rows.append(row)


def comparable(expected: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one dtype that holds either's values exactly."""
    if expected.dtype == actual.dtype:
        return expected, actual
    wide = {torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64}
    dtype = torch.float64 if {expected.dtype, actual.dtype} & wide else torch.float32
    return expected.to(dtype), actual.to(dtype)


def _count(
    case: MaskCase,
    layout: PackedLayout,
    slots: Ints,
    expected: Floats,
    actual: Floats,
    scan: MaskScan,
) -> None:
    """Sort mismatches at dump slots into the rules that they break."""
    at = uncut(layout, Cut(kind="whole" if case.whole else "zigzag"), slots)
    segment = find_segments(layout.cu_seqlens_padded, at)
    position = at - layout.cu_seqlens_padded[segment]
    inside = segment < layout.num_rows
    row = np.zeros_like(segment)
    row[inside] = layout.sequence_index[segment[inside]]
    length = layout.lengths[segment]
    padding = position >= length
    rules: list[tuple[Count, Bools]] = [
        (scan.values, np.ones(len(at), np.bool_)),
        (scan.finite, ~np.isfinite(actual)),
        (scan.padding, padding),
        (scan.last, (position == length - 1) & (case.shift > 0) & (actual != 0)),
        (scan.dropped, inside & ~padding & (case.weights.sample[row] == 0)),
    ]
    for rule, broken in rules:
        if broken.any():
            rule.add(at[broken], expected[broken], actual[broken])
    odd = np.flatnonzero(np.isfinite(actual) & (actual != 0) & (actual != 1))
    if len(odd):
        _count_odd(scan, at[odd], expected[odd], actual[odd])
    if sum(map(len, scan.wrong)) < MOST_SAMPLED:
        scan.wrong.append(slots[:: max(1, len(slots) // 4096)])


def _count_odd(scan: MaskScan, at: Ints, expected: Floats, actual: Floats) -> None:
    """Count slots that hold neither 0 nor 1, by value."""
    values, which, counts = np.unique(actual, return_inverse=True, return_counts=True)
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(counts)
    for value, end, count in zip(values.tolist(), ends.tolist(), counts.tolist(), strict=True):
        if value not in scan.odd and len(scan.odd) > MOST_WEIGHTS:
            value = np.inf  # too many values to tell apart; no batch has that one
        here = order[end - count : end][: 8 * MAX_PLACES]
        found = scan.odd.setdefault(value, Count())
        found.add(at[here], expected[here], actual[here])
        found.count += count - len(here)


def _out_of_range(case: MaskCase, scan: MaskScan) -> Count:
    """Values that are neither 0, 1 nor a weight of the batch's own, which is read once more
    when there are such."""
    found = Count()
    weights: set[float] = set()
    if not scan.odd or case.layout is None:
        return found
    for start, stop in segment_blocks(case.layout, case.width, case.room.values):
        rows = case.layout.part(start, stop).sequence_index
        if len(rows) == 0 or len(weights) > MOST_WEIGHTS:
            continue
        for first in range(0, case.width, case.room.long):
            columns = slice(first, min(first + case.room.long, case.width))
            weights.update(np.unique(as_numbers(_weights(case, rows, columns))).tolist())
    if len(weights) > MOST_WEIGHTS:
        return found
    for value, count in scan.odd.items():
        if value not in weights:
            found.first = sorted([*found.first, *count.first])[:MAX_PLACES]
            found.count += count.count
    return found


def _scan_alone(case: MaskCase, scan: MaskScan) -> None:
    """A mask that no layout fits: what can be said of its values alone."""
    for start, stop in case.slots.blocks():
        values = np.asarray(case.slots.read(start, stop), dtype=np.float64)
        scan.any_nonzero |= bool((values != 0).any())
        scan.all_one &= bool((values == 1).all())
        bad = np.flatnonzero(~np.isfinite(values))
        scan.finite.add(start + bad, np.zeros(len(bad)), values[bad])
