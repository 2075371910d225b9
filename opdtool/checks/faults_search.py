"""Faults that have to be found before they can be tried: an order of rows, an order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from opdtool.checks.hypotheses import Built, PackCase, cut_by, placed_by
from opdtool.checks.recipes import Bools, Cut, Ints, find_segments, placed, uncut
from opdtool.checks.recipes_values import Values
from opdtool.core.layout import PackedLayout

MOST_SLOTS = 1 << 24
"""No search for an order of rows in longer segments than this."""


def permuted_rows(case: PackCase, filled: Any) -> Built | None:
    """The rows in the one other order that gives the dump's segments, if there is one."""
    layout = case.layout
    if layout is None or filled.route.cut.order or filled.route.after.kind != "none":
        return None
    n = layout.num_rows
    if n < 2 or int(layout.padded_lengths.max()) > MOST_SLOTS:
        return None
    there = segment_prints(case, filled, layout)[:n]
    rows = row_prints(case, filled)
    told = case.dump_lengths is not None and np.array_equal(
        np.sort(case.dump_lengths), np.sort(case.lengths)
    )
    lengths_there = case.dump_lengths if told and case.dump_lengths is not None else None
    order = match_order(there, rows, lengths_there, case.lengths)
    if order is None:
        return None
    row, length = np.full(layout.num_segments, -1, dtype=np.int64), np.zeros_like(layout.lengths)
    row[:n] = case.rows[order]
    length[:n] = np.minimum(case.lengths[order], layout.padded_lengths[:n])
    return Built(
        filled=placed_by(filled, placed(layout, row=row, length=length)),
        note=f"the segments hold rows {name_order(case.rows[order])}",
    )


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
    return np.random.default_rng(11).integers(1 << 62, size=count, dtype=np.int64) * 2 + 1


def _bits(case: PackCase, values: Values) -> Ints:
    """Values as integers that can be summed, those that stand for nothing being zero."""
    if values.dtype == np.int64:
        bits: Ints = values
    else:
        bits = (np.asarray(values, dtype=np.float64) + 0.0).view(np.int64)
    return np.where(np.isin(values, case.neutral), 0, bits)


def segment_prints(case: PackCase, filled: Any, layout: PackedLayout) -> Ints:
    """One fingerprint a segment of what the dump holds; zeros count for nothing."""
    multipliers = _multipliers(int(layout.padded_lengths.max()))
    prints = np.zeros(layout.num_segments, dtype=np.int64)
    for start, stop in case.slots.blocks():
        at = uncut(layout, filled.route.cut, np.arange(start, stop, dtype=np.int64))
        segment = find_segments(layout.cu_seqlens_padded, at)
        bits = _bits(case, case.slots.read(start, stop))
        np.add.at(prints, segment, bits * multipliers[at - layout.cu_seqlens_padded[segment]])
    return prints


def row_prints(case: PackCase, filled: Any) -> Ints:
    """One fingerprint a row of what its segment would hold if it were filled so."""
    width = case.lengths + max(0, -filled.route.shift.by)
    apart = PackedLayout(
        cu_seqlens=np.concatenate([[0], np.cumsum(case.lengths)]),
        cu_seqlens_padded=np.concatenate([[0], np.cumsum(width)]),
        sequence_index=case.rows,
    )
    route = replace(filled.route, placement=placed(apart), cut=Cut(kind="whole"))
    alone = replace(filled, route=route)
    multipliers = _multipliers(int(width.max()))
    prints = np.zeros(len(case.rows), dtype=np.int64)
    for start in range(0, apart.total, 1 << 20):
        at = np.arange(start, min(start + (1 << 20), apart.total), dtype=np.int64)
        segment = find_segments(apart.cu_seqlens_padded, at)
        bits = _bits(case, case.values(alone, at))
        np.add.at(prints, segment, bits * multipliers[at - apart.cu_seqlens_padded[segment]])
    return prints


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
    pieces = [take(i * size + local) for i in range(cp)]
    fits = [
        [bool(agrees(rank * size + local, piece).all()) for rank in range(cp)] for piece in pieces
    ]
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
