"""Decreasing-order bin packing, one length class at a time.

First-fit, best-fit and modified first-fit decreasing place equal lengths one after another,
and a whole run of bins with the same room behaves alike: when a class of length l meets a
bin with room r it puts r // l rows there before it looks at the next bin. So bins are kept
as *runs* (first bin, how many, room of each) and a run is advanced in one step.

A step leaves a run with room r % l, less than half of r, so a run is touched at most
log2(capacity) times and a class splits at most one: 8,192 classes over a million rows are
some ten thousand steps. Rows are handed out afterwards, vectorised, from the list of steps.

Class c is the c-th greatest distinct length; rows of one class are taken in row order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from opdtool.core.offsets import Ints

Index = npt.NDArray[np.signedinteger]
Run = tuple[int, int, int]
"""(first bin, number of bins, room left in each)."""

CHUNK_ROWS = 1 << 17
"""Rows that are handled at a time: temporaries stay in the cache, at any batch size."""

LONGEST_TABLE = 1 << 20
"""Longest row for which classes are looked up in a table by length, not searched."""


def index_dtype(rows: int) -> type[np.signedinteger]:
    """The smallest integer type that numbers this many rows (or bins)."""
    return np.int32 if rows < 2**31 else np.int64


def chunks(total: int) -> Iterator[slice]:
    """Slices of at most ``CHUNK_ROWS`` that cover ``range(total)`` in order."""
    return (slice(at, min(at + CHUNK_ROWS, total)) for at in range(0, total, CHUNK_ROWS))


def stable_argsort(keys: npt.NDArray[np.integer], bound: int) -> Ints:
    """The stable order of non-negative keys below ``bound``: a radix sort on 16 bits a pass."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, max(bound - 1, 0).bit_length(), 16):
        digit = (keys[order] >> shift).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
    return order


def counted_places(keys: npt.NDArray[np.integer], cursor: Ints) -> tuple[Ints, Ints]:
    """(order, place): key ``order[i]`` of this chunk goes to ``place[i]`` of a counting sort.

    ``cursor`` int64 [classes] says where the next row of each key goes; it moves on.

        keys 1 0 1, cursor 0 5:   order 1 0 2   place 0 5 6   cursor becomes 1 7
    """
    order = stable_argsort(keys, len(cursor))
    run_keys = keys[order]
    starts = np.flatnonzero(np.diff(run_keys, prepend=-1))
    run_keys = run_keys[starts]
    sizes = np.diff(starts, append=len(keys))
    place = np.arange(len(keys)) + np.repeat(cursor[run_keys] - starts, sizes)
    cursor[run_keys] += sizes
    return order, place


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClasses:
    """The distinct lengths, greatest first, and how many rows have each."""

    values: Ints
    """Distinct lengths, descending, int64 [K]."""
    counts: Ints
    """Rows of each, int64 [K]."""
    table: Ints | None
    """Class by length, where lengths are small enough for a table."""

    @classmethod
    def of(cls, lengths: Ints) -> LengthClasses:
        """The classes of lengths [N], all at least 1."""
        longest = int(lengths.max(initial=0))
        if longest > min(max(len(lengths), 1 << 16), LONGEST_TABLE):
            values, counts = np.unique(lengths, return_counts=True)
            return cls(values=values[::-1].copy(), counts=counts[::-1].copy(), table=None)
        histogram = np.zeros(longest + 1, dtype=np.int64)
        for rows in chunks(len(lengths)):
            histogram += np.bincount(lengths[rows], minlength=longest + 1)
        values = np.flatnonzero(histogram)[::-1].copy()
        table = np.zeros(longest + 1, dtype=np.int64)
        table[values] = np.arange(len(values))
        return cls(values=values, counts=histogram[values], table=table)

    def of_rows(self, lengths: Ints) -> Ints:
        """The class of each length, int64 like ``lengths``."""
        if self.table is not None:
            return self.table[lengths]
        return len(self.values) - 1 - np.searchsorted(self.values[::-1], lengths)


@dataclass(frozen=True, slots=True)
class Steps:
    """What was placed where: flat groups of (class, first bin, stride, bins, rows per bin)."""

    flat: array[int] = field(default_factory=lambda: array("q"))

    def place(self, length_class: int, first: int, bins: int, rows: int, stride: int = 1) -> None:
        """The next ``bins * rows`` rows of a class: ``rows`` in each bin from ``first`` on."""
        self.flat.extend((length_class, first, stride, bins, rows))

    def bins_by_class(self, rows: int) -> Index:
        """The bin of every row, rows ordered by (class, row), [rows]."""
        dtype = index_dtype(rows)
        out = np.empty(rows, dtype=dtype)
        steps = np.frombuffer(self.flat, dtype=np.int64).reshape(-1, 5)
        # A class may have been drawn from out of turn; its rows still go in order of time.
        steps = steps[np.argsort(steps[:, 0], kind="stable")]
        _, first, stride, bins, per_bin = steps.T
        ends = np.cumsum(bins * per_bin)
        at = begin = 0
        while begin < len(steps):
            stop = int(np.searchsorted(ends, at + CHUNK_ROWS, side="right"))
            if stop == begin:
                _fill_large(out[at : ends[begin]], *(int(x) for x in steps[begin, 1:]))
                stop = begin + 1
            else:
                part = slice(begin, stop)
                base = first[part] - stride[part] * (np.cumsum(bins[part]) - bins[part])
                number = np.arange(int(bins[part].sum()))
                number *= np.repeat(stride[part], bins[part])
                number += np.repeat(base, bins[part])
                each = np.repeat(per_bin[part], bins[part])
                out[at : ends[stop - 1]] = np.repeat(number.astype(dtype), each)
            at, begin = int(ends[stop - 1]), stop
        return out


def _fill_large(out: Index, first: int, stride: int, bins: int, per_bin: int) -> None:
    grid = out.reshape(bins, per_bin)
    for some in chunks(bins):
        grid[some] = (first + stride * np.arange(some.start, some.stop))[:, None]


def fit_decreasing(
    classes: Iterable[tuple[int, int]],
    capacity: int,
    steps: Steps,
    *,
    best: bool,
    opened: int = 0,
    runs: Iterable[Run] = (),
) -> int:
    """Place classes of (length, rows) in descending order; the number of bins then open.

    ``best`` takes the bin with the least sufficient room, the lowest of those alike;
    otherwise the lowest bin with sufficient room. ``opened`` bins exist, with these ``runs``.
    """
    # Runs too tight for the present class wait by their room; they come back, all smaller
    # than those in the heap, when the lengths have fallen to it.
    waiting: dict[int, list[tuple[int, int]]] = {}
    rooms: list[int] = []
    fitting: list[tuple[int, int, int]] = []

    def wait(first: int, bins: int, room: int) -> None:
        if room in waiting:
            waiting[room].append((first, bins))
        elif room:
            waiting[room] = [(first, bins)]
            heappush(rooms, -room)

    for run in runs:
        wait(*run)
    for length_class, (length, left) in enumerate(classes):
        while rooms and -rooms[0] >= length:
            room = -heappop(rooms)
            for first, bins in waiting.pop(room):
                heappush(fitting, (room, first, bins) if best else (first, room, bins))
        while left:
            if fitting:
                room, first, bins = heappop(fitting)
                if not best:
                    room, first = first, room
            else:
                room, first, bins = capacity, opened, -(-left // (capacity // length))
                opened += bins
            each = room // length
            full = min(bins, left // each)
            if full:
                steps.place(length_class, first, full, each)
                wait(first, full, room - each * length)
                left -= full * each
            if full == bins:
                continue
            if left:
                # The last bin of the class has room for more of it than there is.
                steps.place(length_class, first + full, 1, left)
                rest = room - left * length
                heappush(fitting, (rest, first + full, 1) if best else (first + full, rest, 1))
                full, left = full + 1, 0
            first, bins = first + full, bins - full
            if bins:
                heappush(fitting, (room, first, bins) if best else (first, room, bins))
    return opened


def modified_first_fit_decreasing(
    lengths: list[int], counts: list[int], capacity: int, steps: Steps
) -> int:
    """Johnson and Garey's MFFD (1985) over length classes; the number of bins.

    With large rows over 1/2 of the capacity, medium over 1/3, small over 1/6:
    (1) every large row opens a bin, greatest first; (2) forward through those bins, each
    takes the greatest medium row that fits; (3) backward through those without a medium
    row, each takes the smallest small row together with the greatest that still fits, as
    long as two fit at all; (4, 5) what is left goes first-fit decreasing.
    """
    left = list(counts)
    large = [c for c, length in enumerate(lengths) if 2 * length > capacity]
    medium = [c for c, length in enumerate(lengths) if 2 * length <= capacity < 3 * length]
    small = [c for c, length in enumerate(lengths) if 3 * length <= capacity < 6 * length]
    opened = 0
    runs: list[Run] = []
    for c in large:
        steps.place(c, opened, left[c], 1)
        runs.append((opened, left[c], capacity - lengths[c]))
        opened += left[c]
        left[c] = 0
    filled, without = _add_medium(runs, medium, lengths, left, steps)
    filled += _add_small_pairs(without, small, lengths, left, steps)
    rest = zip(lengths, left, strict=True)
    return fit_decreasing(rest, capacity, steps, best=False, opened=opened, runs=filled)


def _add_medium(
    runs: list[Run], medium: list[int], lengths: list[int], left: list[int], steps: Steps
) -> tuple[list[Run], list[Run]]:
    filled: list[Run] = []
    without: list[Run] = []
    coming = list(medium)
    fitting: list[int] = []  # a stack, the greatest that fits on top: rooms only grow
    for first, bins, room in runs:
        while coming and lengths[coming[-1]] <= room:
            fitting.append(coming.pop())
        while bins and fitting:
            c = fitting[-1]
            take = min(bins, left[c])
            steps.place(c, first, take, 1)
            filled.append((first, take, room - lengths[c]))
            first, bins = first + take, bins - take
            left[c] -= take
            if not left[c]:
                fitting.pop()
        if bins:
            without.append((first, bins, room))
    return filled, without


def _add_small_pairs(
    runs: list[Run], small: list[int], lengths: list[int], left: list[int], steps: Steps
) -> list[Run]:
    out: list[Run] = []
    low, high = len(small) - 1, 0  # the smallest and the greatest that may still be taken
    for first, bins, room in reversed(runs):
        while bins:
            while low >= high and not left[small[low]]:
                low -= 1
            if low < high:
                break
            least = small[low]
            spare = room - lengths[least]
            # Rooms shrink from here on, so what is too long now is too long for good.
            while high < low and (not left[small[high]] or lengths[small[high]] > spare):
                high += 1
            most = small[high]
            if most == least:
                take = min(bins, left[least] // 2)
                if lengths[least] > spare or not take:
                    break
                steps.place(least, first + bins - 1, take, 2, stride=-1)
            else:
                take = min(bins, left[least], left[most])
                steps.place(least, first + bins - 1, take, 1, stride=-1)
                steps.place(most, first + bins - 1, take, 1, stride=-1)
            left[least] -= take
            left[most] -= take
            bins -= take
            out.append((first + bins, take, spare - lengths[most]))
        if bins:
            out.append((first, bins, room))
    return out


def assign_rows(lengths: Ints, classes: LengthClasses, steps: Steps) -> Index:
    """The bin of every row [N], from the steps that placed its class."""
    sorted_bins = steps.bins_by_class(len(lengths))
    bin_of = np.empty_like(sorted_bins)
    cursor = np.cumsum(classes.counts) - classes.counts
    for rows in chunks(len(lengths)):
        order, place = counted_places(classes.of_rows(lengths[rows]), cursor)
        bin_of[rows][order] = sorted_bins[place]
    return bin_of
