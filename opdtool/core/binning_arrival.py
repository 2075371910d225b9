"""Bin packing in order of arrival: concatenation, and first fit over a shuffled order."""

from __future__ import annotations

from array import array

import numpy as np

from opdtool.core.binning_classes import Index, chunks, index_dtype
from opdtool.core.offsets import Ints


def concatenate(lengths: Ints, capacity: int) -> tuple[Index, int]:
    """(bin of every row [N], bins): in order, a bin is closed when the next row does not fit."""
    bin_of = np.empty(len(lengths), dtype=index_dtype(len(lengths)))
    bins, load = 0, capacity  # as if a full bin came before: the first row opens bin 0
    for rows in chunks(len(lengths)):
        ends = np.cumsum(lengths[rows])
        begins = ends - lengths[rows]
        # Where the next bin would begin if one began at each row: then only bins are walked.
        after = np.searchsorted(ends, begins + capacity, side="right").tolist()
        opens = np.zeros(len(ends), dtype=bin_of.dtype)
        at = int(np.searchsorted(ends, capacity - load, side="right"))
        if at == len(ends):
            load += int(ends[-1])
        while at < len(ends):
            opens[at] = 1
            load = int(ends[-1] - begins[at])
            at = after[at]
        np.cumsum(opens, out=bin_of[rows])
        bin_of[rows] += bins - 1
        bins = int(bin_of[rows][-1]) + 1
    return bin_of, bins


def first_fit_shuffled(lengths: Ints, capacity: int, seed: int) -> tuple[Index, int]:
    """(bin of every row [N], bins): each row, in an order drawn from ``seed``, goes into the
    lowest bin with room for it.

    A tournament tree over the bins holds the greatest room under each node, so that a row
    finds its bin in log2(bins) steps.
    """
    dtype = index_dtype(len(lengths))
    bin_of = np.empty(len(lengths), dtype=dtype)
    generator = np.random.Generator(np.random.PCG64(seed))
    order = generator.permutation(np.arange(len(lengths), dtype=dtype))
    # Two neighbouring bins of a first fit together hold more than one capacity.
    most = min(len(lengths), 2 * -(-int(lengths.sum()) // capacity) + 1)
    leaves = 1 << max(most - 1, 0).bit_length()
    room = array("i" if capacity < 2**31 else "q", [capacity]) * (2 * leaves)
    bins = 0
    for rows in chunks(len(lengths)):
        chosen = array("q")
        for length in lengths[order[rows]].tolist():
            node = 1
            while node < leaves:
                node += node
                if room[node] < length:
                    node += 1
            chosen.append(node)
            rest = room[node] - length
            room[node] = rest
            while node > 1:
                # The parent's room is the greater of the two; above one that keeps its
                # room nothing changes.
                beside = room[node ^ 1]
                rest = max(rest, beside)
                node >>= 1
                if room[node] == rest:
                    break
                room[node] = rest
        places = np.frombuffer(chosen, dtype=np.int64) - leaves
        bin_of[order[rows]] = places
        bins = max(bins, int(places.max()) + 1)
    return bin_of, bins
