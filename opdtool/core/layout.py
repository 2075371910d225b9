"""PackedLayout: the one description of a pack.

Offsets, which source token fills a slot, which rank owns it, which slot is padding: packing,
masks, checks and fault hypotheses all ask the layout and recompute nothing.

Legend: B batch rows, S row width, N segments, T packed slots of the whole pack, a "local"
slot is one of the T / cp_size slots that one context-parallel rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.offsets import (
    CuSeqlens,
    Ints,
    Pieces,
    as_offsets,
    check_cp_multiple,
    check_cp_rank,
    check_offsets,
    runs,
)
from opdtool.core.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """Where every token of a pack is.

    ``cu_seqlens`` and ``cu_seqlens_padded`` are int64 [N+1], from 0: cumulative real and
    physical lengths of the segments. ``sequence_index`` int64 [<=N] says which batch row
    each segment came from; a tail segment without real tokens has no entry.

        lengths 3, 2; cp_size 1; padded to 4:   a b c .  d e . .
        cu_seqlens 0 3 5    cu_seqlens_padded 0 4 8

    Raises:
        InputError: the offsets do not start at 0 or fall, a real length exceeds its padded
            one, or a padded length is no multiple of ``2 * cp_size`` (for cp_size > 1).
    """

    cu_seqlens: Ints
    cu_seqlens_padded: Ints
    cp_size: int = 1
    sequence_index: Ints

    def __post_init__(self) -> None:
        check_cp_rank(0, self.cp_size)
        # A pack whose real and padded offsets are one vector was given the padded ones.
        for name in ("cu_seqlens_padded", "cu_seqlens"):
            check_offsets(name, getattr(self, name))
        if len(self.cu_seqlens) != len(self.cu_seqlens_padded):
            raise InputError(
                f"cu_seqlens has {plural(len(self.cu_seqlens), 'entry')} and cu_seqlens_padded "
                f"{len(self.cu_seqlens_padded)}; both must have one more than the segments"
            )
        too_long = np.flatnonzero(self.lengths > self.padded_lengths)
        if len(too_long):
            b = int(too_long[0])
            raise InputError(
                f"sequence {b} has {self.lengths[b]} real tokens but a padded length of "
                f"{self.padded_lengths[b]}; pass the padded offsets as cu_seqlens_padded"
            )
        check_cp_multiple(self.padded_lengths, self.cp_size)
        if len(self.sequence_index) > self.num_segments:
            raise InputError(
                f"sequence_index has {plural(len(self.sequence_index), 'entry')} for "
                f"{plural(self.num_segments, 'segment')}"
            )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: CuSeqlens,
        cu_seqlens_padded: CuSeqlens,
        *,
        cp_size: int = 1,
        sequence_index: CuSeqlens | None = None,
    ) -> PackedLayout:
        """The layout that given offsets describe; segments are rows 0..N-1 without an index."""
        padded = as_offsets(cu_seqlens_padded, "cu_seqlens_padded")
        real = padded if cu_seqlens is cu_seqlens_padded else as_offsets(cu_seqlens, "cu_seqlens")
        if sequence_index is None:
            index = np.arange(max(len(real) - 1, 0), dtype=np.int64)
        else:
            index = as_offsets(sequence_index, "sequence_index")
        return cls(cu_seqlens=real, cu_seqlens_padded=padded, cp_size=cp_size, sequence_index=index)

    @property
    def lengths(self) -> Ints:
        """Real tokens of each segment, int64 [N]."""
        return np.diff(self.cu_seqlens)

    @property
    def padded_lengths(self) -> Ints:
        """Slots of each segment, int64 [N]."""
        return np.diff(self.cu_seqlens_padded)

    @property
    def num_segments(self) -> int:
        """N, a tail segment included."""
        return len(self.cu_seqlens) - 1

    @property
    def num_rows(self) -> int:
        """Segments that came from a batch row: N, less a tail segment."""
        return len(self.sequence_index)

    @property
    def total(self) -> int:
        """T, the slots of the whole pack."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def local_total(self) -> int:
        """T / cp_size, the slots of one rank."""
        return self.total // self.cp_size

    @property
    def real_tokens(self) -> int:
        """Real tokens of the whole pack."""
        return int(self.cu_seqlens[-1])

    def with_cp(self, cp_size: int) -> PackedLayout:
        """The same pack, cut for another context-parallel size."""
        return PackedLayout(
            cu_seqlens=self.cu_seqlens,
            cu_seqlens_padded=self.cu_seqlens_padded,
            cp_size=cp_size,
            sequence_index=self.sequence_index,
        )

    def part(self, start: int, stop: int) -> PackedLayout:
        """The layout of segments [start, stop) alone; its slot 0 is theirs of the first one."""
        return PackedLayout(
            cu_seqlens=self.cu_seqlens[start : stop + 1] - self.cu_seqlens[start],
            cu_seqlens_padded=self.cu_seqlens_padded[start : stop + 1]
            - self.cu_seqlens_padded[start],
            cp_size=self.cp_size,
            sequence_index=self.sequence_index[start:stop],
        )

    def local_start(self, segment: int) -> int:
        """The first local slot of a segment, the same on every rank."""
        return int(self.cu_seqlens_padded[segment]) // self.cp_size

    def pieces(self, cp_rank: int = 0, *, shift: int = 0, limit: int | None = None) -> Pieces:
        """The runs that fill one rank's slots, each padded segment first rolled by ``shift``.

        ``shift`` follows ``torch.roll``: -1 puts token p+1 in slot p, and what leaves a
        segment on one side comes back on the other. ``limit`` caps every real length (the
        row width S).

            segment a b c . (padded 4), shift -1, cp_size 1:   b c . a
            pieces: dst 0 <- position 1, count 2;  dst 3 <- position 0, count 1
        """
        check_cp_rank(cp_rank, self.cp_size)
        padded = self.padded_lengths
        real = self.lengths if limit is None else np.minimum(self.lengths, limit)
        segment = np.arange(self.num_segments, dtype=np.int64)
        base = self.cu_seqlens_padded[:-1] // self.cp_size
        if self.cp_size == 1:
            begin, width, dst = np.zeros_like(padded), padded, base
        else:
            chunk = padded // (2 * self.cp_size)
            last = 2 * self.cp_size - 1 - cp_rank
            begin = np.stack([cp_rank * chunk, last * chunk], axis=1).ravel()
            dst = np.stack([base, base + chunk], axis=1).ravel()
            width = np.repeat(chunk, 2)
            segment = np.repeat(segment, 2)
            padded, real = np.repeat(padded, 2), np.repeat(real, 2)
        # Slot p of the rolled segment is filled from (p - shift) mod padded; a window may
        # wrap once, so it is at most two runs, and only the real part of each is kept.
        start = begin if shift == 0 else (begin - shift) % np.maximum(padded, 1)
        first = np.minimum(width, padded - start)
        runs_dst = np.stack([dst, dst + first], axis=1)
        runs_start = np.stack([start, np.zeros_like(start)], axis=1)
        runs_width = np.stack([first, width - first], axis=1)
        count = np.minimum(runs_width, real[:, None] - runs_start)
        keep = count > 0
        return Pieces(
            dst=runs_dst[keep],
            segment=np.broadcast_to(segment[:, None], keep.shape)[keep],
            position=runs_start[keep],
            count=count[keep],
        )

    def global_slots(self, cp_rank: int, start: int = 0, stop: int | None = None) -> Tensor:
        """The pack's slots behind local slots [start, stop) of one rank, int64 [stop - start].

        padded 8, cp_size 2, rank 0:   0 1 6 7
        """
        segment, position, count = self._windows(cp_rank, start, stop)
        return torch.from_numpy(runs(self.cu_seqlens_padded[segment] + position, count))

    def local_positions(self, cp_rank: int, start: int = 0, stop: int | None = None) -> Tensor:
        """The positions in their segments of local slots [start, stop), int64 [stop - start]."""
        _, position, count = self._windows(cp_rank, start, stop)
        return torch.from_numpy(runs(position, count))

    def _windows(self, cp_rank: int, start: int, stop: int | None) -> tuple[Ints, Ints, Ints]:
        """Runs of neighbouring slots behind local slots [start, stop): segment, first position
        in it, count; none is empty."""
        check_cp_rank(cp_rank, self.cp_size)
        stop = self.local_total if stop is None else stop
        offsets = self.cu_seqlens_padded // self.cp_size
        first = max(int(np.searchsorted(offsets, start, side="right")) - 1, 0)
        last = min(int(np.searchsorted(offsets, stop, side="left")), self.num_segments)
        segment = np.arange(first, last, dtype=np.int64)
        padded = self.padded_lengths[segment]
        if self.cp_size == 1:
            position, count = np.zeros_like(padded), padded
        else:
            chunk = padded // (2 * self.cp_size)
            back = (2 * self.cp_size - 1 - cp_rank) * chunk
            position = np.stack([cp_rank * chunk, back], axis=1).ravel()
            segment, count = np.repeat(segment, 2), np.repeat(chunk, 2)
        # Clip the runs to the slots asked for.
        begin = offsets[min(first, self.num_segments)] + np.cumsum(count) - count
        low, high = np.maximum(begin, start), np.minimum(begin + count, stop)
        keep = high > low
        return segment[keep], (position + low - begin)[keep], (high - low)[keep]

    def owners(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(cp_rank, local slot) of given slots of the pack, each int64 like ``slots``."""
        if self.cp_size == 1:
            return torch.zeros_like(slots), slots
        segment = self.segments_of(slots)
        begin = torch.from_numpy(self.cu_seqlens_padded)[segment]
        chunk = torch.from_numpy(self.padded_lengths // (2 * self.cp_size))[segment]
        within = slots - begin
        index = torch.div(within, chunk, rounding_mode="floor")
        second = index >= self.cp_size
        rank = torch.where(second, 2 * self.cp_size - 1 - index, index)
        local = begin // self.cp_size + within - index * chunk + torch.where(second, chunk, 0)
        return rank, local

    def segments_of(self, slots: Tensor) -> Tensor:
        """The segment that each slot of the pack lies in, int64 like ``slots``."""
        # Empty segments share their offset with the next one: `right` skips them.
        return torch.searchsorted(torch.from_numpy(self.cu_seqlens_padded), slots, right=True) - 1

    def positions_of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(segment, position in it) of given slots of the pack, each int64 like ``slots``."""
        segment = self.segments_of(slots)
        return segment, slots - torch.from_numpy(self.cu_seqlens_padded)[segment]

    def is_real(self, segment: Tensor, position: Tensor) -> Tensor:
        """Whether a position of a segment holds a real token, bool."""
        return (position >= 0) & (position < torch.from_numpy(self.lengths)[segment])

    def row_of(self, segment: int) -> int | None:
        """The batch row of a segment; None for a tail segment."""
        return int(self.sequence_index[segment]) if segment < self.num_rows else None

    def locate(self, slot: int) -> dict[str, int]:
        """Where a slot of the pack is, for a report: sequence (batch row), position, slot,
        cp_rank; ``segment`` too where it is not the row, and no sequence in a tail segment."""
        at = torch.tensor([slot])
        segment, position = (int(x) for x in self.positions_of(at))
        place: dict[str, int] = {}
        row = self.row_of(segment)
        if row is not None:
            place["sequence"] = row
        if row != segment:
            place["segment"] = segment
        return place | {"position": position, "slot": slot, "cp_rank": int(self.owners(at)[0])}
