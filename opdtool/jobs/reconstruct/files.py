"""Reading what a plan names: tokens of payloads and logits, rows of heads, one slice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opdtool.core.offsets import Ints
from opdtool.core.rebuild import TokenGrid
from opdtool.io.closing import Closing
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.jobs.reconstruct.plan import HeadAt, NormAt, Plan, Sharded, TensorAt

SPAN = 32 << 20
"""Bytes read at once where only some columns of them are wanted."""


class Files(Closing):
    """The open files of a plan. Reads are safe from several threads."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._open: dict[Path, TensorSource] = {}

    def source(self, at: TensorAt) -> TensorSource:
        """The open file or directory that holds a tensor."""
        if at.path not in self._open:
            self._open[at.path] = open_tensors([at.path])
        return self._open[at.path]

    def tokens(self, at: TensorAt, flat: Ints, columns: slice | Ints | None = None) -> Tensor:
        """[n, columns] of a token-aligned tensor [B, S, X] (or [n] of [B, S]), by flat index."""
        source = self.source(at)
        width = at.shape[1]
        tail = list(at.shape[2:]) if columns is None else [_count(columns)]
        out: Tensor | None = None
        for offset, start, count in runs(flat):
            for o, rows, cols in _row_pieces(start, count, width):
                piece = self._piece(source, at, rows, cols, columns)
                if len(piece) == len(flat):
                    return piece
                if out is None:
                    out = torch.empty([len(flat), *tail], dtype=at.dtype)
                out[offset + o : offset + o + len(piece)] = piece
        return torch.empty([0, *tail], dtype=at.dtype) if out is None else out

    def _piece(
        self,
        source: TensorSource,
        at: TensorAt,
        rows: slice,
        cols: slice,
        columns: slice | Ints | None,
    ) -> Tensor:
        if columns is None:
            return source.read(at.name, rows, cols).flatten(0, 1)
        if isinstance(columns, slice):
            return source.read(at.name, rows, cols, columns).flatten(0, 1)
        low, high = int(columns.min()), int(columns.max()) + 1
        index = torch.from_numpy(columns - low)
        step = max(1, SPAN // ((high - low) * at.dtype.itemsize))
        parts = []
        for row in range(rows.start, rows.stop):
            for start in range(cols.start, cols.stop, step):
                some = slice(start, min(start + step, cols.stop))
                span = source.read(at.name, slice(row, row + 1), some, slice(low, high))
                parts.append(span[0].index_select(1, index))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def head_rows(self, head: HeadAt, rows: slice | Ints) -> Tensor:
        """[v, H]: some rows of a head."""
        source = self.source(head.weight)
        if isinstance(rows, slice):
            return source.read(head.weight.name, rows)
        return source.read_rows(head.weight.name, rows)

    def norm_weight(self, norm: NormAt) -> Tensor:
        """[H]: the weight of a norm."""
        return self.source(norm.weight).read(norm.weight.name)

    def logits(
        self,
        recorded: Sharded,
        slots: Ints,
        unit: Ints,
        position: Ints,
        cp_rank: int,
        columns: slice | Ints,
    ) -> Tensor:
        """[n, v] of recorded logits: for a rank's own slots, in the plan's columns, out of the
        shards that have them, however the vocabulary was cut."""
        plan = self.plan
        wanted = plan.draft[columns] if recorded.gathered and plan.draft is not None else columns

        def read(shard: int, some: slice | Ints) -> Tensor:
            at = recorded.files[shard, cp_rank if recorded.cp_size > 1 else 0]
            return self.tokens(at, self._stored(recorded, at, slots, unit, position), some)

        starts = recorded.starts
        if isinstance(wanted, slice):
            spans = [
                (shard, max(wanted.start, first) - first, min(wanted.stop, last) - first)
                for shard, (first, last) in enumerate(pairwise(starts))
            ]
            parts = [read(shard, slice(low, high)) for shard, low, high in spans if low < high]
            return torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        owner = np.searchsorted(np.asarray(starts), wanted, side="right") - 1
        if (owner == owner[0]).all():
            return read(int(owner[0]), wanted - starts[owner[0]])
        out = torch.empty(len(slots), len(wanted), dtype=recorded.dtype)
        for shard in np.unique(owner).tolist():
            own = np.flatnonzero(owner == shard)
            out[:, torch.from_numpy(own)] = read(shard, wanted[own] - starts[shard])
        return out

    def _stored(
        self, recorded: Sharded, at: TensorAt, slots: Ints, unit: Ints, position: Ints
    ) -> Ints:
        """The flat indices of a rank's slots in a file of recorded logits."""
        if recorded.cp_size > 1:
            return slots
        # A file of all positions is as wide as it is, whatever the plan pads to.
        offsets = self.plan.layout.cu_seqlens_padded if self.plan.packed else None
        return TokenGrid(width=at.shape[1], offsets=offsets).flat(unit, position)

    def close(self) -> None:
        """Close all files."""
        for source in self._open.values():
            source.close()
        self._open.clear()


def runs(flat: Ints) -> Iterator[tuple[int, int, int]]:
    """(offset, first value, count) of each stretch of consecutive values.

    5 6 7 2 3:   (0, 5, 3), (3, 2, 2)
    """
    if len(flat) == 0:
        return
    breaks = np.flatnonzero(np.diff(flat) != 1) + 1
    edges = [0, *breaks.tolist(), len(flat)]
    for low, high in pairwise(edges):
        yield low, int(flat[low]), high - low


def _row_pieces(start: int, count: int, width: int) -> Iterator[tuple[int, slice, slice]]:
    """(offset, rows, columns) boxes of a row-major [rows, width] that make up a flat range."""
    done = 0
    while done < count:
        row, column = divmod(start + done, width)
        whole = (count - done) // width if column == 0 else 0
        if whole:
            yield done, slice(row, row + whole), slice(0, width)
            done += whole * width
        else:
            some = min(width - column, count - done)
            yield done, slice(row, row + 1), slice(column, column + some)
            done += some


def _count(columns: slice | Ints) -> int:
    return columns.stop - columns.start if isinstance(columns, slice) else len(columns)
