"""Recipes: which token fills each slot of a pack, in the right way and in every known wrong one.

A recipe is a function from slots to where each is filled from. It is evaluated on any slots
at all: on a few thousand to screen a fault, or block by block over a tensor larger than
memory to confirm it. Its axes are independent, so a pair of faults is a recipe that differs
from the right one on two of them:

    a dump's slot -> (roll after the cut) -> cut -> slot of the pack
                  -> shift within the segment -> placement -> batch row and column

Legend: a "dump slot" counts through the ranks' pieces, ``rank * T/CP + local`` (for a dump of
the whole pack it is the slot itself). All arrays here are numpy: they are indices, small or
in blocks, and never touch a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from opdtool.core.layout import PackedLayout

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ShiftKind = Literal["segment", "segment-circular", "pack-circular"]
AfterKind = Literal["none", "segment", "segment-circular", "rank", "rank-circular"]
CutKind = Literal["whole", "zigzag", "contiguous", "pack-zigzag", "pack-contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Where rows lie in the pack before any shift.

    Segment m covers slots ``offsets[m]..offsets[m+1]`` and its slot p holds column
    ``p - lead[m]`` of batch row ``row[m]`` while that column is in ``0..length[m]`` and p is
    below ``stop[m]``; every other slot is zero. ``layout`` is what the ranks cut by.

        lead 0, length 3:   a b c .        lead 1 (right-aligned in 4):   . a b c
    """

    layout: PackedLayout
    offsets: Ints
    row: Ints
    length: Ints
    lead: Ints
    stop: Ints


def segment_rows(layout: PackedLayout) -> Ints:
    """The batch row of each segment, int64 [N]; -1 where there is none."""
    rows = np.full(layout.num_segments, -1, dtype=np.int64)
    rows[: layout.num_rows] = layout.sequence_index
    return rows


def placed(
    layout: PackedLayout,
    *,
    length: Ints | None = None,
    lead: Ints | None = None,
    row: Ints | None = None,
    stop: Ints | None = None,
) -> Placement:
    """Rows laid out by the padded offsets, from position 0 and as long as they are.

    What is given (each int64 [N]) replaces its part of the right placement.
    """
    width = layout.padded_lengths
    return Placement(
        layout=layout,
        offsets=layout.cu_seqlens_padded,
        row=segment_rows(layout) if row is None else row,
        length=layout.lengths if length is None else length,
        lead=np.zeros_like(width) if lead is None else lead,
        stop=width if stop is None else stop,
    )


def placed_unpadded(layout: PackedLayout) -> Placement:
    """Rows laid out end to end by the real offsets, what is left up to T being zero."""
    rest = np.zeros(1, dtype=np.int64)
    length = np.append(layout.lengths, 0)
    return Placement(
        layout=layout,
        offsets=np.append(layout.cu_seqlens, layout.total),
        row=np.append(segment_rows(layout), -1),
        length=length,
        lead=np.zeros_like(length),
        stop=np.append(layout.lengths, rest),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Slot t speaks of slot ``t + by``: inside its segment with what leaves it zero, circular
    in its segment, or circular over the whole pack."""

    kind: ShiftKind = "segment"
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """A shift made on a rank's own piece, after the cut: inside each segment's piece or over
    all the rank holds."""

    kind: AfterKind = "none"
    by: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which slots of the pack a rank holds. ``order[i]`` is the rank whose piece is in place i."""

    kind: CutKind
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """All the axes of where a slot is filled from."""

    placement: Placement
    shift: Shift
    cut: Cut
    after: After = After()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What is behind some dump slots. All arrays have one entry a slot.

    ``segment`` and ``position`` are of the slot itself, once uncut; ``row`` and ``column``
    are of the token it is filled from, where ``real``, and (0, 0) elsewhere. ``alive`` is
    false where a roll after the cut left a zero whatever the pack held.
    """

    segment: Ints
    position: Ints
    row: Ints
    column: Ints
    real: Bools
    alive: Bools
    source_segment: Ints
    source_position: Ints


def find_segments(offsets: Ints, slots: Ints) -> Ints:
    """The segment that each slot lies in; empty segments hold none.

    Many slots in order are cut at the offsets, which is several times quicker than a search
    for every one of them.
    """
    if len(slots) > 4 * len(offsets) and bool((slots[1:] >= slots[:-1]).all()):
        edges = np.searchsorted(slots, offsets)
        counts = np.diff(edges, prepend=0, append=len(slots))
        return np.repeat(np.arange(-1, len(offsets), dtype=np.int64), counts)
    found: Ints = np.searchsorted(offsets, slots, side="right") - 1
    return found


def uncut(layout: PackedLayout, cut: Cut, slots: Ints) -> Ints:
    """The pack's slot behind each dump slot, int64 like ``slots``."""
    if cut.kind == "whole":
        return slots
    rank, local = np.divmod(slots, layout.local_total)
    return _slots_of_rank(layout, cut, rank, local)


def _slots_of_rank(layout: PackedLayout, cut: Cut, rank: Ints, local: Ints) -> Ints:
    cp = layout.cp_size
    if cut.order is not None:
        rank = np.asarray(cut.order, dtype=np.int64)[rank]
    last = 2 * cp - 1 - rank
    if cut.kind == "pack-contiguous":
        return rank * layout.local_total + local
    if cut.kind == "pack-zigzag":
        chunk = layout.total // (2 * cp)
        return local + np.where(local < chunk, rank * chunk, (last - 1) * chunk)
    segment = find_segments(layout.cu_seqlens_padded // cp, local)
    begin = layout.cu_seqlens_padded[segment]
    within = local - begin // cp
    if cp == 1:
        return begin + within
    width = layout.padded_lengths[segment]
    if cut.kind == "contiguous":
        ahead: Ints = rank * (width // cp)
    else:
        half = width // (2 * cp)
        ahead = np.where(within < half, rank * half, (last - 1) * half)
    return begin + within + ahead


def trace(recipe: Recipe, slots: Ints) -> Trace:
    """Where the given dump slots (int64, any number, in 0..T) are filled from."""
    place = recipe.placement
    layout = place.layout
    alive = np.ones(len(slots), dtype=np.bool_)
    if recipe.after.kind != "none":
        slots, alive = _roll_after_cut(recipe, slots)
    at = uncut(layout, recipe.cut, slots)
    segment = find_segments(place.offsets, at)
    position = at - place.offsets[segment]
    source_segment, source_position, inside = _shifted(recipe, at, segment, position)
    column = source_position - place.lead[source_segment]
    real = (
        alive
        & inside
        & (place.row[source_segment] >= 0)
        & (column >= 0)
        & (column < place.length[source_segment])
        & (source_position < place.stop[source_segment])
    )
    return Trace(
        segment=segment,
        position=position,
        row=np.where(real, place.row[source_segment], 0),
        column=np.where(real, column, 0),
        real=real,
        alive=alive,
        source_segment=source_segment,
        source_position=source_position,
    )


def _shifted(recipe: Recipe, at: Ints, segment: Ints, position: Ints) -> tuple[Ints, Ints, Bools]:
    """(segment, position, whether inside) of the slot that each slot speaks of."""
    place, by = recipe.placement, recipe.shift.by
    inside = np.ones(len(at), dtype=np.bool_)
    if by == 0:
        return segment, position, inside
    if recipe.shift.kind == "pack-circular":
        there = (at + by) % place.layout.total
        segment = find_segments(place.offsets, there)
        return segment, there - place.offsets[segment], inside
    width = np.diff(place.offsets)[segment]
    there = position + by
    if recipe.shift.kind == "segment-circular":
        return segment, there % width, inside
    inside = (there >= 0) & (there < width)
    return segment, np.where(inside, there, position), inside


def _roll_after_cut(recipe: Recipe, slots: Ints) -> tuple[Ints, Bools]:
    """(dump slot that each dump slot speaks of, whether it is inside) for a late roll."""
    layout, after = recipe.placement.layout, recipe.after
    size = layout.total if recipe.cut.kind == "whole" else layout.local_total
    rank, local = np.divmod(slots, size)
    if after.kind in ("segment", "segment-circular"):
        offsets = layout.cu_seqlens_padded * size // max(layout.total, 1)
        segment = find_segments(offsets, local)
        begin, width = offsets[segment], np.diff(offsets)[segment]
    else:
        begin, width = np.zeros_like(local), np.full_like(local, size)
    there = local - begin + after.by
    if after.kind in ("segment-circular", "rank-circular"):
        return rank * size + begin + there % width, np.ones(len(slots), np.bool_)
    inside = (there >= 0) & (there < width)
    return rank * size + begin + np.where(inside, there, local - begin), inside
