"""What recipes are filled with: values of a batch and of a dump, fetched for any places.

Nothing here reads a file: a batch and a dump's pieces are whatever answers the two protocols.
Legend: B batch rows, S row width, F any further dimensions of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opdtool.checks.recipes import Ints
from opdtool.checks.room import ROOM, Room

Values = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

GAP = 1 << 12
"""Values nearer than this are read in one go."""
SPARSE, SPARSE_AT_LEAST = 512, 8
"""Of how many values in its rows one is asked for, so that it is read alone and not the rows:
of fewer tokens where a token has many values."""


class Rows(Protocol):
    """A batch: tensors [B,S,...] read by rows and columns."""

    def read(self, name: str, rows: Any, columns: slice | None = None) -> Tensor:
        """Rows (a slice or an int64 array), in the order asked, of some columns."""
        ...


def as_numbers(values: Tensor) -> Values:
    """Any mask as numpy: float64 for float64 and int64, else float32, which holds it exactly."""
    if values.dtype in (torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64):
        return values.to(torch.float64).numpy()
    return values.to(torch.float32).numpy()


def as_keys(values: Tensor, wide: bool = False, floats: bool = False) -> Values:
    """One int64 a token [n, ...] -> [n], equal where the token is (0.0 and -0.0 are one, and
    every NaN is itself). Tokens with further dimensions are hashed.

    Floats, and with ``floats`` all numbers, are compared as float32, or with ``wide`` as
    float64, which hold every narrower dtype exactly.
    """
    if floats or values.is_floating_point():
        values = values.to(torch.float64 if wide else torch.float32) + 0.0
        values = values.contiguous().view(torch.int64 if wide else torch.int32)
    size = prod(values.shape[1:])
    if size == 1:
        return values.reshape(len(values)).to(torch.int64).numpy()
    if values.dtype == torch.uint64:
        values = values.view(torch.int64)  # numpy would make floats of it
    bits = values.reshape(len(values), size).numpy()  # -1 has no meaning for no tokens
    multipliers = np.random.default_rng(7).integers(1 << 62, size=size) * 2 + 1
    # A sum of products without the products, which would be many times the tokens.
    return np.asarray(np.einsum("ij,j->i", bits, multipliers, dtype=np.int64, casting="unsafe"))


@dataclass(slots=True, kw_only=True)
class Cells:
    """Values of one batch tensor at any (row, column), with the rows last used at hand.

    ``decode`` turns a tensor [n, ...] into one number a token, [n].
    """

    batch: Rows
    name: str
    width: int
    decode: Callable[[Tensor], Values]
    token_size: int = 1
    room: Room = ROOM
    _rows: dict[int, Values] = field(default_factory=dict)

    def forget(self) -> None:
        """Let go of the rows at hand."""
        self._rows.clear()

    def at(self, rows: Ints, columns: Ints) -> Values:
        """The value at each (row, column), one a place."""
        if len(rows) == 0:
            return self._decoded(self.batch.read(self.name, slice(0, 0)))[:0].reshape(-1)
        wanted, which = _distinct(rows)
        room = max(1, self.room.cells // max(1, self.width * self.token_size))
        sparse = max(SPARSE // self.token_size, SPARSE_AT_LEAST)
        few = sparse * len(rows) <= len(wanted) * self.width
        keepable = self.token_size == 1 and 2 * len(wanted) <= room
        if self.width * self.token_size > self.room.cells or (few and not keepable):
            return self._windows(rows, columns)
        if len(wanted) <= room:
            return self._gather(wanted, which, columns)
        out: Values | None = None
        for start in range(0, len(wanted), room):
            here = np.flatnonzero((which >= start) & (which < start + room))
            part = self._gather(wanted[start : start + room], which[here] - start, columns[here])
            out = np.empty(len(rows), dtype=part.dtype) if out is None else out
            out[here] = part
        assert out is not None
        return out

    def _gather(self, wanted: Ints, which: Ints, columns: Ints) -> Values:
        missing = [row for row in wanted.tolist() if row not in self._rows]
        if missing:
            if (len(self._rows) + len(missing)) * self.width > self.room.cells:
                self._rows.clear()
                missing = wanted.tolist()
            block = self._decoded(self.batch.read(self.name, _neighbours(missing)))
            self._rows.update(zip(missing, block, strict=True))
        table = np.stack([self._rows[row] for row in wanted.tolist()])
        return np.asarray(table[which, columns])

    def _windows(self, rows: Ints, columns: Ints) -> Values:
        """Rows too long to hold: read in runs of columns that are near each other."""
        place = rows * self.width + columns
        order = np.argsort(place, kind="stable")
        room = max(1, self.room.cells // self.token_size)
        parts = []
        for first, last in runs(place[order], room, rows[order], gap=self._gap):
            here = order[first:last]
            row, start = int(rows[here[0]]), int(columns[here[0]])
            stop = int(columns[here[-1]]) + 1
            read = self.batch.read(self.name, slice(row, row + 1), slice(start, stop))
            parts.append(self._decoded(read)[0][columns[here] - start])
        out = np.empty(len(rows), dtype=parts[0].dtype)
        out[order] = np.concatenate(parts)
        return out

    @property
    def _gap(self) -> int:
        return max(1, GAP // self.token_size)

    def _decoded(self, block: Tensor) -> Values:
        """A block [k, s, ...] as one number a token, [k, s]."""
        shape = block.shape[:2]
        return self.decode(block.flatten(0, 1)).reshape(shape)


def _distinct(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, sorted, and which of them each one is: one run of equal values
    after the other, for a pack asks for whole stretches of a row."""
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    if 4 * len(edges) > len(values):
        return np.unique(values, return_inverse=True)
    runs_of = values[np.concatenate([[0], edges])]
    distinct, which = np.unique(runs_of, return_inverse=True)
    return distinct, np.repeat(which, np.diff(edges, prepend=0, append=len(values)))


def _neighbours(rows: list[int]) -> slice | Ints:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return np.asarray(rows, dtype=np.int64)


def runs(
    places: Ints, room: int, also: Ints | None = None, *, gap: int = GAP
) -> list[tuple[int, int]]:
    """Sorted places in runs that one read serves: (first, last) indices, gaps of at most
    ``gap``, spans at most ``room``, and ``also`` the same all through."""
    if len(places) == 0:
        return []
    new = np.diff(places) > gap
    if also is not None:
        new |= np.diff(also) != 0
    starts = [0, *(np.flatnonzero(new) + 1).tolist(), len(places)]
    found = []
    for first, stop in pairwise(starts):
        at = first
        while at < stop:
            end = int(np.searchsorted(places[at:stop], places[at] + room, side="left")) + at
            found.append((at, end))
            at = end
    return found


@dataclass(slots=True, kw_only=True)
class Slots:
    """A dumped tensor, one number a slot, counted through the ranks' pieces.

    ``pieces[r](start, stop)`` reads local slots of piece r as [n, ...]; ``sizes`` are the
    slots of each. A small dump is kept once it was read.
    """

    pieces: Sequence[Callable[[int, int], Tensor]]
    sizes: Sequence[int]
    decode: Callable[[Tensor], Values]
    token_size: int = 1
    room: Room = ROOM
    _kept: Values | None = None

    def forget(self) -> None:
        """Let go of what was kept."""
        self._kept = None

    @property
    def total(self) -> int:
        """Slots over all pieces."""
        return sum(self.sizes)

    def read(self, start: int, stop: int) -> Values:
        """Slots [start, stop), one number each."""
        if self._kept is not None:
            return self._kept[start:stop]
        parts, base = [], 0
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            first, last = max(start - base, 0), min(stop - base, size)
            if first < last:
                parts.append(self.decode(piece(first, last)))
            base += size
        if not parts:
            return self.decode(self.pieces[0](0, 0))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def take(self, slots: Ints) -> Values:
        """The values of sorted slots, in any number."""
        if self._kept is None and 8 * self.total * self.token_size <= self.room.cells:
            self._kept = self.read(0, self.total)
        if self._kept is not None:
            return self._kept[slots]
        room = max(1, self.room.cells // self.token_size)
        parts = []
        for first, last in runs(slots, room, gap=max(1, GAP // self.token_size)):
            begin = int(slots[first])
            block = self.read(begin, int(slots[last - 1]) + 1)
            parts.append(block[slots[first:last] - begin])
        return np.concatenate(parts) if parts else self.read(0, 0)

    def blocks(self) -> list[tuple[int, int]]:
        """The whole dump as (start, stop) in blocks that fit the memory."""
        step = max(1, min(self.room.slots, self.room.cells // (4 * self.token_size)))
        return [(at, min(at + step, self.total)) for at in range(0, self.total, step)]
