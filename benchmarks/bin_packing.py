"""Bin packing: all algorithms on log-normal lengths, beside a plain best fit row by row."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

import numpy as np

from benchmarks.harness import Row, best, best_each, main
from opdtool.core.binning import ALGORITHMS, pack_bins
from opdtool.core.offsets import Ints

CAPACITY = 8192
SIZES = {"small": 10_000, "middle": 100_000, "large": 1_000_000}


def log_normal(rows: int) -> Ints:
    """Lengths with median 1000 and sigma 1.0, clipped to 1..8192."""
    draw = np.random.default_rng(0).normal(np.log(1000), 1.0, rows)
    return np.clip(np.exp(draw).astype(np.int64), 1, CAPACITY)


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The bin of each row: best-fit decreasing, one row after the other.

    A good plain one: distinct rooms in a sorted list, the bins of each room in a heap.
    """
    bin_of = [0] * len(lengths)
    rooms: list[int] = []
    bins_with: dict[int, list[int]] = {}
    opened = 0
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        length = lengths[row]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            number, rest = opened, capacity - length
            opened += 1
        else:
            room = rooms[at]
            number, rest = heappop(bins_with[room]), room - length
            if not bins_with[room]:
                del bins_with[room], rooms[at]
        bin_of[row] = number
        if rest not in bins_with:
            bins_with[rest] = []
            insort(rooms, rest)
        heappush(bins_with[rest], number)
    return bin_of


def rows(scale: str) -> list[Row]:
    """Times of every algorithm, and their bins over the least number there could be."""
    count = SIZES[scale]
    lengths = log_normal(count)
    as_list = lengths.tolist()
    size, whole = f"{count:,} rows", scale == "large"
    bound = -(-int(lengths.sum()) // CAPACITY)
    ours, plain = best_each(
        [lambda: pack_bins(lengths, CAPACITY), lambda: plain_best_fit(as_list, CAPACITY)],
        repeats=3,
        warmup=0 if whole else 1,
    )
    packed = pack_bins(lengths, CAPACITY)
    assert packed.count == max(plain_best_fit(as_list, CAPACITY)) + 1
    out = [
        Row(
            name="bin packing, bfd (default)",
            size=size,
            ours=ours,
            plain=plain,
            ratio=plain / ours,
            goal="< 0.5 s" if whole else "",
            reached=ours < 0.5 if whole else None,
            work=count,
        )
    ]
    for algorithm in ALGORITHMS:
        bins = pack_bins(lengths, CAPACITY, algorithm=algorithm).count
        promised = whole and algorithm == "bfd"
        out.append(
            Row(
                name=f"bins over the bound, {algorithm}",
                size=size,
                ours=bins,
                plain=bound,
                ratio=bins / bound,
                goal="<= 1.001" if promised else "",
                reached=bins <= 1.001 * bound if promised else None,
                unit="",
            )
        )
        if algorithm != "bfd":
            spent = best(
                lambda name=algorithm: pack_bins(lengths, CAPACITY, algorithm=name),  # type: ignore[misc]
                repeats=2,
                warmup=0,
            )
            out.append(
                Row(
                    name=f"bin packing, {algorithm}",
                    size=size,
                    ours=spent,
                    plain=plain,
                    ratio=plain / spent,
                    work=count,
                )
            )
    return out


if __name__ == "__main__":
    main(rows, __doc__)
