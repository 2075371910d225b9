"""Faults that have to be found before they can be tried: an order of rows, an order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from opdtool.checks.hypotheses import Built, PackCase, cut_by, placed_by
from opdtool.checks.recipes import Bools, Cut, Ints, find_segments, placed, uncut
from opdtool.checks.recipes_values import Values
from opdtool.core.layout import PackedLayout

BASE = 6364136223846793005
"""An odd number whose powers spread the places of a sum."""
MOST_ORDERED = 1 << 22
MOST_COMPARED = 1024
MOST_STEPS = 20_000
MOST_FOUND = 16
LEAST_ORDERED = 1 << 19
"""As many slots are put in order however little memory there is."""
FEW = 8
"""Slots by which rows are told apart before they are read whole."""
TABLE = 1 << 18
"""Multipliers of this many places are kept at hand; those of others are made as they are used."""


def permuted_rows(case: PackCase, filled: Any) -> Built | None:
    """The rows in the one other order that gives the dump's segments, if there is one."""
    layout = case.layout
    if layout is None or filled.route.cut.order or filled.route.after.kind != "none":
        return None
    n = layout.num_rows
    if n < 2 or not (_same_amount(case, filled) and _row_for_a_wrong_segment(case, filled, layout)):
        return None
    there = segment_prints(case, filled, layout)[:n]
    rows = row_prints(case, filled)
    told = case.dump_lengths is not None and np.array_equal(
        np.sort(case.dump_lengths), np.sort(case.lengths)
    )
    lengths_there = case.dump_lengths if told and case.dump_lengths is not None else None
    order = match_order(there, rows, lengths_there, case.lengths)
    if order is None and lengths_there is not None:
        # The rows alone were shuffled: cu_seqlens still tells of the batch's own order.
        order = match_order(there, rows, None, case.lengths)
    if order is None:
        return None
    row, length = np.full(layout.num_segments, -1, dtype=np.int64), np.zeros_like(layout.lengths)
    row[:n] = case.rows[order]
    length[:n] = np.minimum(case.lengths[order], layout.padded_lengths[:n])
    return Built(
        filled=placed_by(filled, placed(layout, row=row, length=length)),
        note=f"the segments hold rows {name_order(case.rows[order])}",
    )


def permuted_and_laid_out(case: PackCase, filled: Any) -> Built | None:
    """The rows in the one other order that gives the dump when each takes its own room.

    Segments then begin where the order says, so that the order is found segment by segment,
    from the first slot on.
    """
    n = len(case.rows)
    cp = 1 if case.whole else case.geometry.cp_size
    padded = case.geometry.padded(case.lengths)
    if (
        n < 2
        or filled.route.cut.order
        or filled.route.after.kind != "none"
        or case.slots.total > min(MOST_ORDERED, max(LEAST_ORDERED, case.room.cells))
        or int(padded.sum()) > case.slots.total
        or not (_same_amount(case, filled) and _row_for_the_first_slots(case, filled, padded // cp))
    ):
        return None
    apart = PackedLayout(
        cu_seqlens=np.concatenate([[0], np.cumsum(case.lengths)]),
        cu_seqlens_padded=np.concatenate([[0], np.cumsum(padded)]),
        cp_size=cp,
        sequence_index=case.rows,
    )
    alone = replace(filled, route=replace(filled.route, placement=placed(apart)))
    made_alone = [case.values(alone, slots) for slots in _ranges(apart.total, case.room.slots)]
    expected = _columns(_all_bits(case, made_alone), cp)
    dumped = [case.slots.read(*block) for block in case.slots.blocks()]
    there = _columns(_all_bits(case, dumped), cp)
    fits: list[Built] = []
    for order in order_segments(there, expected, padded // cp):
        layout = with_tail(case, case.lengths[order], padded[order], case.rows[order])
        if layout is None:
            continue
        made = placed_by(filled, placed(layout))
        if all(
            case.agrees(made, slots, case.slots.take(slots)).all()
            for slots in _ranges(case.slots.total, case.room.slots)
        ):
            note = f"the segments hold rows {name_order(case.rows[order])}"
            fits.append(Built(filled=made, note=note))
    return fits[0] if len(fits) == 1 else None


def _same_amount(case: PackCase, filled: Any) -> bool:
    """Whether the dump holds as many values other than zero as the rows do, in whatever order;
    true where they were not counted, or the values are not those of the right filling."""
    right, layout = case.right, case.layout
    if not case.surplus or right is None or layout is None:
        return True
    n = len(case.lengths)
    if not np.array_equal(np.minimum(layout.lengths, layout.padded_lengths)[:n], case.lengths):
        return True  # the right filling lacks what does not fit
    same_route = all(
        getattr(filled.route, part) == getattr(right.route, part)
        for part in ("shift", "cut", "after")
    )
    others = [part.name for part in fields(filled) if part.name != "route"]
    same = same_route and all(getattr(filled, name) == getattr(right, name) for name in others)
    return not same


def _row_for_a_wrong_segment(case: PackCase, filled: Any, layout: PackedLayout) -> bool:
    """Whether any row, laid where a segment is that is wrong, would make what is there.

    A cheap look at a few slots: where no row does, no order of rows makes the dump.
    """
    right = case.right
    if case.surplus is not None or case.sample is None or right is None:
        return True
    wrong = case.sample[~case.agrees(right, case.sample, case.slots.take(case.sample))]
    if len(wrong) == 0:
        return True
    slots = np.arange(wrong[0], min(wrong[0] + FEW, case.slots.total), dtype=np.int64)
    at = uncut(layout, filled.route.cut, slots)
    segment = find_segments(layout.cu_seqlens_padded, at)
    # As far as the slots stay beside each other in one segment.
    beside = (segment == segment[0]) & (at - at[0] == slots - slots[0])
    slots, at = slots[beside], at[beside]
    if segment[0] >= layout.num_rows:
        return True
    positions = at - layout.cu_seqlens_padded[segment[0]]
    return _some_row_makes(case, filled, positions, case.slots.take(slots))


def _row_for_the_first_slots(case: PackCase, filled: Any, local: Ints) -> bool:
    """Whether any row would make what the dump begins with; ``local`` are the slots that each
    takes on a rank."""
    cp = 1 if case.whole else case.geometry.cp_size
    few = min(FEW, int(local.min()) // (2 if cp > 1 else 1))
    plain = filled.route.shift.kind == "segment" and filled.route.cut.kind in ("whole", "zigzag")
    if case.surplus is not None or few == 0 or not plain:
        return True
    slots = np.arange(few, dtype=np.int64)
    return _some_row_makes(case, filled, slots, case.slots.take(slots))


def _some_row_makes(case: PackCase, filled: Any, positions: Ints, actual: Values) -> bool:
    """Whether some row, alone in its segment, holds these values at these positions."""
    there = _bits(case, actual)
    apart, alone = _rows_apart(case, filled)
    width = np.diff(apart.cu_seqlens_padded)
    step = max(1, case.room.slots // len(positions))
    for first in range(0, len(width), step):
        rows = slice(first, first + step)
        inside = positions < width[rows, None]
        slots = (apart.cu_seqlens_padded[:-1][rows, None] + positions)[inside]
        made = np.zeros(inside.shape, dtype=np.int64)
        made[inside] = _bits(case, case.values(alone, slots))
        if (made == there).all(axis=1).any():
            return True
    return False


def with_tail(case: PackCase, lengths: Ints, padded: Ints, rows: Ints) -> PackedLayout | None:
    """A layout of these segments, filled up to the dump's slots as the geometry says; None
    where it has more slots than the dump, or the ranks cannot be cut from it."""
    tail = case.slots.total - int(padded.sum())
    if tail < 0 or len(padded) == 0:
        return None
    if tail and case.geometry.tail == "segment":
        lengths, padded = np.append(lengths, 0), np.append(padded, tail)
    elif tail:
        padded = padded + np.where(np.arange(len(padded)) == len(padded) - 1, tail, 0)
    cp = 1 if case.whole else case.geometry.cp_size
    if cp > 1 and (padded % (2 * cp)).any():
        return None
    return PackedLayout(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        cu_seqlens_padded=np.concatenate([[0], np.cumsum(padded)]),
        cp_size=cp,
        sequence_index=rows,
    )


def _ranges(total: int, step: int) -> Iterator[Ints]:
    """All slots, some at a time."""
    for start in range(0, total, step):
        yield np.arange(start, min(start + step, total), dtype=np.int64)


def _all_bits(case: PackCase, blocks: Sequence[Values]) -> Ints:
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *(_bits(case, values) for values in blocks)])


def _columns(bits: Ints, cp: int) -> Ints:
    """One number a local slot, of what all ranks hold there."""
    mixed: Ints = (bits.reshape(cp, -1) * _multipliers(cp)[:, None]).sum(axis=0, dtype=np.int64)
    return mixed


def order_segments(there: Ints, expected: Ints, sizes: Ints) -> list[Ints]:
    """Every order of segments, but 0, 1, 2..., that makes ``there`` begin as it does; none
    where two segments are the same, or there are too many.

    ``expected`` holds the segments one after the other, of ``sizes`` each. The last one in
    the order may be followed, and so cut, in another way: it is what is left.
    """
    powers = np.cumprod(np.full(len(there) + 1, BASE, dtype=np.int64))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    sums = np.concatenate([[0], np.cumsum(expected * powers[: len(expected)])])
    keys = [
        (int(size), _scaled(sums, start, start + size, powers))
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=False)
    ]
    place = {key: i for i, key in enumerate(keys)}
    if len(place) != len(keys):
        return []
    prefix = np.concatenate([[0], np.cumsum(there * powers[: len(there)])])
    widths = sorted({int(size) for size in sizes})
    found: list[list[int]] = []
    steps = MOST_STEPS
    stack: list[tuple[int, list[int]]] = [(0, [])]
    while stack and steps and len(found) <= MOST_FOUND:
        steps -= 1
        at, chosen = stack.pop()
        if len(chosen) == len(sizes) - 1:
            found.append([*chosen, *(set(range(len(sizes))) - set(chosen))])
            continue
        for width in widths:
            if at + width > len(there):
                break
            key = (width, _scaled(prefix, at, at + width, powers))
            row = place.get(key)
            if row is not None and row not in chosen:
                stack.append((at + width, [*chosen, row]))
    if stack:
        return []
    return [np.asarray(o, dtype=np.int64) for o in found if o != list(range(len(sizes)))]


def _scaled(sums: Ints, start: int, stop: int, powers: Ints) -> int:
    """The sum over a stretch as if it began at one place, the same for every stretch."""
    with np.errstate(over="ignore"):
        return int((sums[stop] - sums[start]) * powers[len(powers) - 1 - start])


def name_order(order: Ints) -> str:
    """An order in words, long ones cut short."""
    shown = ", ".join(str(int(i)) for i in order[:16])
    return shown + (f" and {len(order) - 16} more" if len(order) > 16 else "")


def match_order(there: Ints, rows: Ints, lengths_there: Ints | None, lengths: Ints) -> Ints | None:
    """The order p with ``there[i] == rows[p[i]]``, if it is the only one and not 0, 1, 2...

    Where the dump tells its segments' lengths, they must agree as well.
    """
    here = [0] * len(rows) if lengths_there is None else lengths.tolist()
    keys = list(zip(rows.tolist(), here, strict=True))
    place = {key: i for i, key in enumerate(keys)}
    if len(place) != len(keys):
        return None
    told = [0] * len(there) if lengths_there is None else lengths_there.tolist()
    found = [place.get(key, -1) for key in zip(there.tolist(), told, strict=True)]
    if -1 in found or len(set(found)) != len(found) or found == list(range(len(found))):
        return None
    return np.asarray(found, dtype=np.int64)


def _multipliers(count: int) -> Ints:
    return _mixed(np.arange(count, dtype=np.int64))


def _mixed(places: Ints) -> Ints:
    """An odd number a place, which tells nothing of those of the places beside it."""
    bits = (places + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(29))) | np.uint64(1)
    return bits.view(np.int64)


def _multipliers_for(most: int) -> Callable[[Ints], Ints]:
    """Gives the multipliers of any places below ``most``."""
    return _multipliers(most).__getitem__ if most <= TABLE else _mixed


def _bits(case: PackCase, values: Values) -> Ints:
    """Values as integers that can be summed, those that stand for nothing being zero."""
    if values.dtype == np.int64:
        bits: Ints = values
    else:
        bits = (np.asarray(values, dtype=np.float64) + 0.0).view(np.int64)
    return np.where(np.isin(values, case.neutral), 0, bits)


def segment_prints(case: PackCase, filled: Any, layout: PackedLayout) -> Ints:
    """One fingerprint a segment of what the dump holds; zeros count for nothing."""
    multipliers = _multipliers_for(int(layout.padded_lengths.max()))
    prints = np.zeros(layout.num_segments, dtype=np.int64)
    for start, stop in case.slots.blocks():
        at = uncut(layout, filled.route.cut, np.arange(start, stop, dtype=np.int64))
        segment = find_segments(layout.cu_seqlens_padded, at)
        bits = _bits(case, case.slots.read(start, stop))
        np.add.at(prints, segment, bits * multipliers(at - layout.cu_seqlens_padded[segment]))
    return prints


def row_prints(case: PackCase, filled: Any) -> Ints:
    """One fingerprint a row of what its segment would hold if it were filled so."""
    apart, alone = _rows_apart(case, filled)
    multipliers = _multipliers_for(int(apart.padded_lengths.max()))
    prints = np.zeros(len(case.rows), dtype=np.int64)
    for at in _ranges(apart.total, case.room.slots):
        segment = find_segments(apart.cu_seqlens_padded, at)
        bits = _bits(case, case.values(alone, at))
        np.add.at(prints, segment, bits * multipliers(at - apart.cu_seqlens_padded[segment]))
    return prints


def _rows_apart(case: PackCase, filled: Any) -> tuple[PackedLayout, Any]:
    """Every row in a segment of its own, with room for what is shifted out of it, and the
    filling of that."""
    width = case.lengths + max(0, -filled.route.shift.by)
    apart = PackedLayout(
        cu_seqlens=np.concatenate([[0], np.cumsum(case.lengths)]),
        cu_seqlens_padded=np.concatenate([[0], np.cumsum(width)]),
        sequence_index=case.rows,
    )
    route = replace(filled.route, placement=placed(apart), cut=Cut(kind="whole"))
    return apart, replace(filled, route=route)


def swapped_ranks(case: PackCase, filled: Any) -> Built | None:
    """The pieces in the other order of ranks that gives the dump, if there is one."""
    cp = case.geometry.cp_size
    if case.whole or cp == 1 or case.sample is None:
        return None
    size = case.slots.total // cp
    local = np.unique(case.sample % size)
    order = find_ranks(
        cp,
        size,
        local,
        case.slots.take,
        lambda slots, actual: case.agrees(filled, slots, actual),
    )
    if order is None:
        return None
    return Built(
        filled=cut_by(filled, Cut(kind=filled.route.cut.kind, order=order)),
        note=f"the files are those of ranks {', '.join(map(str, order))}, in this order",
    )


def find_ranks(
    cp: int,
    size: int,
    local: Ints,
    take: Callable[[Ints], Values],
    agrees: Callable[[Ints, Values], Bools],
) -> tuple[int, ...] | None:
    """``order[i]``, the rank whose right piece agrees with piece i on all ``local`` slots.

    None where there is no such order but 0, 1, 2...
    """
    local = local[:: max(1, len(local) // MOST_COMPARED)]
    pieces = np.concatenate([take(i * size + local) for i in range(cp)])
    # Every piece against every rank at once: place (rank, piece, local slot).
    ranks = np.repeat(np.arange(cp, dtype=np.int64), cp * len(local))
    agree = agrees(ranks * size + np.tile(local, cp * cp), np.tile(pieces, cp))
    fits: list[list[bool]] = np.asarray(agree.reshape(cp, cp, -1).all(axis=2).T).tolist()
    order = _assign(fits, [])
    return order if order is not None and order != tuple(range(cp)) else None


def _assign(fits: list[list[bool]], chosen: list[int]) -> tuple[int, ...] | None:
    """One rank for each piece, its own where that fits."""
    i = len(chosen)
    if i == len(fits):
        return tuple(chosen)
    for rank in sorted(range(len(fits)), key=lambda rank: (rank != i, rank)):
        if fits[i][rank] and rank not in chosen:
            found = _assign(fits, [*chosen, rank])
            if found is not None:
                return found
    return None
