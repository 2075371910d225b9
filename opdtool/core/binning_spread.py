"""Raising the number of bins: new bins take rows from the fullest ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from opdtool.core.binning_classes import Index
from opdtool.core.offsets import Ints


def spread(
    bin_of: Index, loads: Ints, rows_in: Callable[[int], Ints], lengths: Ints, target: int
) -> None:
    """Move rows, in ``bin_of`` [N], out of the fullest bins into new ones up to ``target``.

    Row by row, the fullest bin that has more than one gives to the emptiest new bin: the
    longest row of at most half their difference, else its shortest. It ends when every new
    bin has a row and no move would bring the two closer. A new bin never becomes fuller than
    the giver was, so no bin comes to exceed the capacity. Among equal bins the lowest, among
    equal rows the first. Needs at least ``target`` rows.
    """
    # Givers untouched so far are read off one sorted list; those touched are in a heap.
    sizes = np.bincount(bin_of, minlength=len(loads))
    untouched = np.argsort(-loads, kind="stable")
    untouched = untouched[sizes[untouched] > 1]
    touched: list[tuple[int, int]] = []
    rows_of: dict[int, list[tuple[int, int]]] = {}
    # All empty, by number: a heap as they stand.
    takers = [(0, b) for b in range(len(loads), target)]
    following = 0
    while takers:
        fresh = following < len(untouched) and (
            not touched or (-int(loads[untouched[following]]), untouched[following]) < touched[0]
        )
        if fresh:
            giver = int(untouched[following])
            following += 1
            full = int(loads[giver])
            rows = rows_in(giver)
            rows_of[giver] = sorted(zip(lengths[rows].tolist(), (-rows).tolist(), strict=True))
        elif touched:
            negative, giver = heappop(touched)
            full = -negative
        else:
            return
        load, taker = takers[0]
        options = rows_of[giver]
        # Rows are stored as (length, -row), so that of equal lengths the first row is last.
        at = max(bisect_right(options, ((full - load) // 2, 0)) - 1, 0)
        if at == 0:
            at = bisect_right(options, (options[0][0], 0)) - 1
        length, negative_row = options[at]
        if load and length >= full - load:
            return
        del options[at]
        bin_of[-negative_row] = taker
        heappop(takers)
        heappush(takers, (load + length, taker))
        if len(options) > 1:
            heappush(touched, (-(full - length), giver))
