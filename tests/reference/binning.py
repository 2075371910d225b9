"""Bin packing one row at a time, as the textbooks say it: slow, obvious, and trusted."""

from __future__ import annotations

import numpy as np


def concat(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows in order; a bin is closed when the next row does not fit."""
    bins: list[list[int]] = []
    load = 0
    for row, length in enumerate(lengths):
        if not bins or load + length > capacity:
            bins.append([])
            load = 0
        bins[-1].append(row)
        load += length
    return bins


def _place(bins: list[list[int]], room: list[int], number: int, row: int, length: int) -> None:
    bins[number].append(row)
    room[number] -= length
    assert room[number] >= 0


def first_fit(
    lengths: list[int],
    capacity: int,
    order: list[int],
    bins: list[list[int]] | None = None,
) -> list[list[int]]:
    """Each row of ``order`` into the first bin with room for it; into a new one if none has."""
    bins = [] if bins is None else bins
    room = [capacity - sum(lengths[r] for r in rows) for rows in bins]
    for row in order:
        for number in range(len(bins)):
            if room[number] >= lengths[row]:
                break
        else:
            bins.append([])
            room.append(capacity)
            number = len(bins) - 1
        _place(bins, room, number, row, lengths[row])
    return bins


def decreasing(lengths: list[int]) -> list[int]:
    """Rows by falling length, equal lengths in row order."""
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """First fit over falling lengths."""
    return first_fit(lengths, capacity, decreasing(lengths))


def first_fit_shuffled(lengths: list[int], capacity: int, seed: int) -> list[list[int]]:
    """First fit over numpy's PCG64 permutation."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths))
    return first_fit(lengths, capacity, [int(row) for row in order])


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Falling lengths, each into the bin with the least sufficient room, the lowest of equals."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in decreasing(lengths):
        fits = [number for number in range(len(bins)) if room[number] >= lengths[row]]
        if not fits:
            bins.append([])
            room.append(capacity)
            fits = [len(bins) - 1]
        number = min(fits, key=lambda n: (room[n], n))
        _place(bins, room, number, row, lengths[row])
    return bins


def modified_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Johnson and Garey's five phases, row by row."""
    order = decreasing(lengths)
    large = [r for r in order if lengths[r] * 2 > capacity]
    medium = [r for r in order if capacity < lengths[r] * 3 and lengths[r] * 2 <= capacity]
    small = [r for r in order if capacity < lengths[r] * 6 and lengths[r] * 3 <= capacity]
    tiny = [r for r in order if lengths[r] * 6 <= capacity]
    bins = [[row] for row in large]
    room = [capacity - lengths[row] for row in large]
    paired = [False] * len(bins)
    for number in range(len(bins)):
        fits = [row for row in medium if lengths[row] <= room[number]]
        if fits:
            _place(bins, room, number, fits[0], lengths[fits[0]])
            medium.remove(fits[0])
            paired[number] = True
    for number in reversed(range(len(bins))):
        if paired[number] or len(small) < 2:
            continue
        if lengths[small[-1]] + lengths[small[-2]] > room[number]:
            continue
        least = min(small, key=lambda r: (lengths[r], r))
        _place(bins, room, number, least, lengths[least])
        small.remove(least)
        most = next(row for row in small if lengths[row] <= room[number])
        _place(bins, room, number, most, lengths[most])
        small.remove(most)
    rest = sorted(medium + small + tiny, key=lambda row: (-lengths[row], row))
    return first_fit(lengths, capacity, rest, bins)


def canonical(bins: list[list[int]]) -> list[list[int]]:
    """Rows ascending in each bin, bins by their first rows."""
    return sorted(sorted(rows) for rows in bins)
