"""Bin packing: which rows share a microbatch, and how well the microbatches are filled.

Contract 5.1. The algorithms live beside this module: those that take rows in descending
order in ``binning_classes``, those that take them as they come in ``binning_arrival``.
Memory beyond the lengths themselves stays at some twelve bytes a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from opdtool.core.binning_arrival import concatenate, first_fit_shuffled
from opdtool.core.binning_classes import (
    Index,
    LengthClasses,
    Steps,
    assign_rows,
    chunks,
    counted_places,
    fit_decreasing,
    index_dtype,
    modified_first_fit_decreasing,
)
from opdtool.core.binning_spread import spread
from opdtool.core.errors import InputError
from opdtool.core.offsets import Ints, as_offsets
from opdtool.core.words import plural

Algorithm = Literal["concat", "ffd", "ffs", "mffd", "bfd"]

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """N rows in ``count`` bins, the bins in the order of their first rows.

    lengths 5 4 3 3, capacity 8, bfd:   bin_of 0 1 0 1   loads 8 7
                                        order 0 2 1 3    offsets 0 2 4
    """

    bin_of: Index
    """The bin of each row, int32 (int64 from 2**31 rows on) [N]."""
    order: Index
    """The rows bin after bin, each bin's in batch order, like ``bin_of`` [N]."""
    offsets: Ints
    """Where each bin begins in ``order``, int64 [count + 1]."""
    loads: Ints
    """The slots each bin's rows fill, int64 [count]."""
    capacity: int
    """The slots of a bin."""

    @property
    def count(self) -> int:
        """How many bins there are."""
        return len(self.loads)

    @property
    def sizes(self) -> Ints:
        """The rows in each bin, int64 [count]."""
        return np.diff(self.offsets)

    def rows(self, number: int) -> Ints:
        """The rows of one bin in batch order, int64."""
        return self.order[self.offsets[number] : self.offsets[number + 1]].astype(np.int64)


def pack_bins(
    lengths: Ints,
    capacity: int,
    *,
    algorithm: str = "bfd",
    seed: int = 0,
    min_bins: int = 1,
    bins_multiple_of: int = 1,
) -> Bins:
    """Every row in one bin, no bin over its capacity; deterministic.

    ``lengths`` [N] are padded lengths, at least 1; ``capacity`` is what a bin's rows may
    fill. The algorithms:

    - ``concat``: in order; a bin is closed when the next row does not fit.
    - ``ffd``: first-fit decreasing, ``bfd``: best-fit decreasing. Equal lengths go in row
      order, equal rooms to the lowest bin.
    - ``mffd``: modified first-fit decreasing (Johnson and Garey, 1985).
    - ``ffs``: first fit over the order that ``seed`` draws.

    There are at least ``min_bins`` bins, and a multiple of ``bins_multiple_of``: new bins
    take rows out of the fullest until both are even.

    Raises:
        InputError: a row is longer than the capacity or shorter than 1, an option is out of
            its range, or there are fewer rows than the bins wanted.
    """
    lengths = as_offsets(lengths, "lengths")
    _check_request(lengths, capacity, algorithm, min_bins, bins_multiple_of)
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be at least 0")
    if algorithm == "concat":
        bin_of, count = concatenate(lengths, capacity)
    elif algorithm == "ffs":
        bin_of, count = first_fit_shuffled(lengths, capacity, seed)
    else:
        bin_of, count = _decreasing(lengths, capacity, algorithm)
    target = -(-max(count, min_bins) // bins_multiple_of) * bins_multiple_of
    if target > count:
        _check_enough(len(lengths), count, target, min_bins, bins_multiple_of)
        apart = _by_bin(bin_of, lengths, count, capacity)
        spread(bin_of, apart.loads, apart.rows, lengths, target)
    _number_by_first_row(bin_of, target)
    return _by_bin(bin_of, lengths, target, capacity)


def _decreasing(lengths: Ints, capacity: int, algorithm: str) -> tuple[Index, int]:
    classes, steps = LengthClasses.of(lengths), Steps()
    values, counts = classes.values.tolist(), classes.counts.tolist()
    if algorithm == "mffd":
        count = modified_first_fit_decreasing(values, counts, capacity, steps)
    else:
        pairs = zip(values, counts, strict=True)
        count = fit_decreasing(pairs, capacity, steps, best=algorithm == "bfd")
    return assign_rows(lengths, classes, steps), count


def _by_bin(bin_of: Index, lengths: Ints, count: int, capacity: int) -> Bins:
    sizes, loads = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for rows in chunks(len(lengths)):
        np.add.at(sizes, bin_of[rows], 1)
        np.add.at(loads, bin_of[rows], lengths[rows])
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    order = np.empty_like(bin_of)
    cursor = offsets[:-1].copy()
    for rows in chunks(len(lengths)):
        within, place = counted_places(bin_of[rows], cursor)
        order[place] = within + rows.start
    return Bins(bin_of=bin_of, order=order, offsets=offsets, loads=loads, capacity=capacity)


def _number_by_first_row(bin_of: Index, count: int) -> None:
    """Renumber bins in place, so that their first rows ascend."""
    first = np.empty(count, dtype=np.int64)
    for rows in reversed(list(chunks(len(bin_of)))):
        # Of several rows written to one bin the last write stays: the lowest row.
        first[bin_of[rows][::-1]] = np.arange(rows.stop - 1, rows.start - 1, -1)
    number = np.empty(count, dtype=bin_of.dtype)
    number[np.argsort(first)] = np.arange(count, dtype=index_dtype(count))
    for rows in chunks(len(bin_of)):
        bin_of[rows] = number[bin_of[rows]]


def _check_request(
    lengths: Ints, capacity: int, algorithm: str, min_bins: int, bins_multiple_of: int
) -> None:
    if algorithm not in ALGORITHMS:
        raise InputError(f"algorithm is {algorithm!r}; it is one of {', '.join(ALGORITHMS)}")
    for name, value in (
        ("capacity", capacity),
        ("min-bins", min_bins),
        ("bins-multiple-of", bins_multiple_of),
    ):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if not len(lengths):
        return
    shortest, longest = int(lengths.argmin()), int(lengths.argmax())
    if lengths[shortest] < 1:
        raise InputError(
            f"row {shortest} has {plural(lengths[shortest], 'token')}; every row needs at least "
            "one: leave empty rows out with --drop-empty"
        )
    if lengths[longest] > capacity:
        over = np.flatnonzero(lengths > capacity)
        row = int(over[0])
        more = f" (and {len(over) - 1} more rows like it)" if len(over) > 1 else ""
        raise InputError(
            f"row {row} needs {lengths[row]} padded slots, more than the {capacity} that a "
            f"bin may hold{more}; raise --max-tokens to hold the longest row, "
            f"{plural(lengths[longest], 'slot')}"
        )


def _check_enough(rows: int, count: int, target: int, min_bins: int, bins_multiple_of: int) -> None:
    if rows >= target:
        return
    why = f"min-bins {min_bins} and bins-multiple-of {bins_multiple_of}"
    raise InputError(
        f"{plural(rows, 'sequence')} cannot fill {plural(target, 'bin')} (the {count} needed, "
        f"raised to {why}) with at least one each: {plural(target - rows, 'sequence')} missing; "
        "add them, or ask for fewer bins"
    )
