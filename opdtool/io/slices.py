"""Reading a box or a set of rows of a stored array: only the bytes that are needed.

A box of an array in C order is many equal runs of bytes. Long runs are read one by one,
straight to where they belong. Short runs that lie close together are read with the gaps
between them, in blocks, and copied out: one call for many runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from opdtool.io.pread import SourceFile

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]

SHORT_RUN = 16 << 10
"""A shorter run is cheaper read together with its neighbours than alone."""
CLOSE = 32 << 10
"""Gaps up to this many bytes are read over."""
BLOCK = 8 << 20
"""The most that is read at once with gaps in it."""


def read_box(
    file: SourceFile,
    offset: int,
    itemsize: int,
    shape: Sequence[int],
    box: Sequence[tuple[int, int]],
    out: Bytes,
) -> None:
    """Fill ``out`` with ``array[box]`` of the array of ``shape`` stored at ``offset``.

    ``box`` has a (start, stop) for every dimension; ``out`` is flat and contiguous.
    """
    if out.nbytes == 0:
        return
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    start = offset + sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    extents = [stop - begin for begin, stop in box]
    inner = len(shape)  # dimensions from here on are one contiguous run
    run = itemsize
    while inner > 0:
        inner -= 1
        run *= extents[inner]
        if extents[inner] != shape[inner]:
            break
    while inner > 0 and extents[inner - 1] == 1:
        inner -= 1
    if inner == 0:
        file.read_into(out.data, start)
        return
    count, stride = extents[inner - 1], strides[inner - 1]
    steps = [range(0, extents[d] * strides[d], strides[d]) for d in range(inner - 1)]
    table = out.reshape(-1, count, run)
    for index, shifts in enumerate(itertools.product(*steps)):
        _read_runs(file, start + sum(shifts), stride, table[index])


def _read_runs(file: SourceFile, start: int, stride: int, out: Bytes) -> None:
    """Fill ``out`` [count, run] with ``count`` runs that begin ``stride`` bytes apart."""
    count, run = out.shape
    if run >= SHORT_RUN or stride - run > CLOSE:
        for index in range(count):
            file.read_into(out[index].data, start + index * stride)
        return
    block = max(1, min(count, BLOCK // stride))
    scratch = np.empty(block * stride, np.uint8)
    for first in range(0, count, block):
        rows = min(block, count - first)
        span = (rows - 1) * stride + run
        file.read_into(scratch[:span].data, start + first * stride)
        out[first : first + rows] = scratch.reshape(block, stride)[:rows, :run]


def read_rows(
    file: SourceFile, offset: int, row_bytes: int, rows: Rows, window: tuple[int, int], out: Bytes
) -> None:
    """Fill ``out`` [len(rows), run] with the bytes ``window`` of each row asked for.

    Rows may come in any order and more than once. Long ones are read straight to their place,
    neighbours together; short ones in the order of the file, near ones in one call.
    """
    begin, stop = window
    run = stop - begin
    if len(rows) == 0 or run == 0:
        return
    offset += begin
    if run >= SHORT_RUN or row_bytes > BLOCK // 8:
        follows = np.diff(rows) == 1 if run == row_bytes else np.zeros(len(rows) - 1, bool)
        starts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(rows)]
        for first, last in itertools.pairwise(starts):
            place = offset + int(rows[first]) * row_bytes
            file.read_into(out[first:last].reshape(-1).data, place)
        return
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    in_order = bool((rows[1:] > rows[:-1]).all())  # ascending, and none twice
    gaps = (np.diff(ordered) - 1) * row_bytes + (row_bytes - run)
    breaks = np.flatnonzero(gaps > CLOSE) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    limit = max(1, BLOCK // row_bytes)
    for first, last in itertools.pairwise(edges):
        at = first
        while at < last:
            base = int(ordered[at])
            upto = at + int(np.searchsorted(ordered[at:last], base + limit))
            span = int(ordered[upto - 1]) - base + 1
            place = offset + base * row_bytes
            if in_order and run == row_bytes and span == upto - at:
                file.read_into(out[at:upto].reshape(-1).data, place)
            elif upto - at == 1:
                file.read_into(out[int(order[at])].data, place)
            else:
                scratch = np.empty(span * row_bytes, np.uint8)
                file.read_into(scratch[: (span - 1) * row_bytes + run].data, place)
                picked = scratch.reshape(span, row_bytes)[ordered[at:upto] - base]
                out[order[at:upto]] = picked[:, :run]
            at = upto
