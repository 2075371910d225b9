"""Writing packs: a batch streamed into one file per microbatch and context-parallel rank.

Legend: B batch rows, S row width, N segments, T packed slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.masks import draft_pieces, token_weights
from opdtool.core.offsets import Pieces
from opdtool.core.packing import fill_pieces, pack_positions
from opdtool.core.plan import PackPlan
from opdtool.core.words import plural
from opdtool.io.writer import TensorFileWriter, TensorSpec, dtype_code

if TYPE_CHECKING:
    from opdtool.io.batch import Batch

DERIVED = ("target_ids", "position_ids", "draft_token_mask")
"""What packing computes; a batch's own tensors of these names are not carried along."""
PACK_TENSORS = (*DERIVED, "cu_seqlens", "cu_seqlens_padded", "sequence_index")
"""Every name that a pack's file gives a meaning of its own."""


class Sink(Protocol):
    """Where files go: a whole output directory, or one rank's part of it."""

    def tensor_file(
        self, name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> TensorFileWriter: ...


def pack_name(microbatch: int, cp_rank: int, cp_size: int) -> str:
    """``pack-00000.safetensors``, or ``pack-00000.cp0of2.safetensors`` for cp_size > 1."""
    part = f".cp{cp_rank}of{cp_size}" if cp_size > 1 else ""
    return f"pack-{microbatch:05d}{part}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackContents:
    """Which tensors of a batch a pack carries, and which of them it derives."""

    token_aligned: tuple[str, ...]
    row_aligned: tuple[str, ...]
    left_out: tuple[str, ...]
    """Token-aligned tensors of the batch that have the name of one that packing computes."""
    has_mask: bool

    @classmethod
    def of(cls, batch: Batch) -> PackContents:
        """What a pack of this batch holds.

        Raises:
            InputError: there are no ``input_ids``, or a tensor that would be lost or clash.
        """
        batch.require("input_ids")
        batch.refuse_others()
        if "input_ids" not in batch.token_aligned:
            raise InputError(
                f"{batch.paths[0]}: input_ids has shape {list(batch.info('input_ids').shape)}; "
                "expected [B,S]"
            )
        if "token_mask" in batch and "token_mask" not in batch.token_aligned:
            raise InputError(
                f"{batch.paths[0]}: token_mask has shape {list(batch.info('token_mask').shape)}; "
                f"expected [B,S] = [{batch.rows}, {batch.width}] as input_ids"
            )
        if "sample_mask" in batch and "sample_mask" not in batch.row_aligned:
            raise InputError(
                f"{batch.paths[0]}: sample_mask has shape "
                f"{list(batch.info('sample_mask').shape)}; expected [B]"
            )
        return cls(
            token_aligned=tuple(n for n in batch.token_aligned if n not in PACK_TENSORS),
            row_aligned=tuple(n for n in batch.row_aligned if n not in PACK_TENSORS),
            left_out=tuple(
                n for n in (*batch.token_aligned, *batch.row_aligned) if n in PACK_TENSORS
            ),
            has_mask="token_mask" in batch.token_aligned,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWriter:
    """Streams microbatches of one batch into files, a bounded block of rows at a time."""

    batch: Batch
    plan: PackPlan
    contents: PackContents
    max_memory: int
    advance: Callable[[int], None] = lambda tokens: None
    """Told how many tokens have been packed since it was last told."""

    def write(self, sink: Sink, microbatch: int, cp_ranks: Collection[int]) -> None:
        """Write one microbatch's files for the given context-parallel ranks."""
        layout = self.plan.layout(microbatch)
        if layout.total > np.iinfo(np.int32).max:
            raise InputError(
                f"a pack has {plural(layout.total, 'slot')}, more than int32 cumulative lengths "
                "can count; "
                "split the batch with --max-tokens"
            )
        with ExitStack() as stack:
            files = {
                rank: stack.enter_context(
                    sink.tensor_file(
                        pack_name(microbatch, rank, layout.cp_size), self._specs(layout)
                    )
                )
                for rank in cp_ranks
            }
            self._write_small(files, layout)
            for start, stop, columns in self._blocks(layout):
                self._write_block(files, layout, start, stop, columns)
                done = layout.cu_seqlens[stop] - layout.cu_seqlens[start]
                self.advance(int(done) if columns is None else columns.stop - columns.start)

    def _specs(self, layout: PackedLayout) -> list[TensorSpec]:
        T, N = layout.local_total, layout.num_segments
        ids = self.batch.info("input_ids").dtype
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "target_ids": (ids, (1, T)),
            "position_ids": ("I64", (1, T)),
            "cu_seqlens": ("I32", (N + 1,)),
            "cu_seqlens_padded": ("I32", (N + 1,)),
            "sequence_index": ("I64", (layout.num_rows,)),
        }
        if self.contents.has_mask:
            shapes["draft_token_mask"] = (self._draft_dtype(), (1, T))
        for name in self.contents.token_aligned:
            info = self.batch.info(name)
            shapes[name] = (info.dtype, (1, T, *info.shape[2:]))
        for name in self.contents.row_aligned:
            info = self.batch.info(name)
            shapes[name] = (info.dtype, (layout.num_rows, *info.shape[1:]))
        return [TensorSpec(name, dtype, shape) for name, (dtype, shape) in shapes.items()]

    def _draft_dtype(self) -> str:
        mask = self.batch.info("token_mask").torch_dtype
        sample = self.batch.sample_mask()
        return dtype_code(mask if sample is None else torch.promote_types(mask, sample.dtype))

    def _write_small(self, files: Mapping[int, TensorFileWriter], layout: PackedLayout) -> None:
        """The tensors of one entry a segment or row, the same in every rank's file."""
        index = layout.sequence_index
        small = {
            "cu_seqlens": torch.from_numpy(layout.cu_seqlens.astype(np.int32)),
            "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded.astype(np.int32)),
            "sequence_index": torch.from_numpy(index.astype(np.int64)),
        }
        for name in self.contents.row_aligned:
            small[name] = self.batch.read(name, _rows(index))
        for file in files.values():
            for name, values in small.items():
                file.write(name, values)

    def _blocks(self, layout: PackedLayout) -> Iterator[tuple[int, int, slice | None]]:
        """Segments [start, stop) whose rows fit the memory; a row that alone does not is cut
        into column slices."""
        widest = max(
            self.batch.info(name).itemsize * int(np.prod(self.batch.info(name).shape[2:]))
            for name in self.contents.token_aligned
        )
        # A row is held as read, as a weight, and packed once for each rank in turn.
        slots = max(1, self.max_memory // (4 * max(widest, 16)))
        per_row = np.maximum(layout.padded_lengths, self.batch.width)
        start = 0
        while start < layout.num_segments:
            stop = start + int(np.searchsorted(np.cumsum(per_row[start:]), slots, side="right"))
            if stop > start:
                yield start, stop, None
                start = stop
                continue
            length = int(layout.lengths[start])
            for first in range(0, max(length, 1), slots):
                yield start, start + 1, slice(first, min(first + slots, length))
            start += 1

    def _write_block(
        self,
        files: Mapping[int, TensorFileWriter],
        layout: PackedLayout,
        start: int,
        stop: int,
        columns: slice | None,
    ) -> None:
        part, base = layout.part(start, stop), layout.local_start(start)
        rows = part.sequence_index
        if columns is None or columns.start == 0:
            self._write_positions(files, part, base)
        plain = {rank: part.pieces(rank) for rank in files}
        target = _Target(files, part, base, columns)
        for name in self.contents.token_aligned:
            if len(rows) == 0:  # a tail segment holds zeros, as the file already does
                target.leave_zero(name)
                continue
            block = self.batch.read(name, _rows(rows), columns)
            target.put(name, block, plain)
            if name == "input_ids":
                rolled = {rank: part.pieces(rank, shift=-1) for rank in files}
                target.put("target_ids", block, rolled)
            if name == "token_mask":
                weights = token_weights(block, self._sample_weights(name, block, rows))
                ahead = {rank: draft_pieces(part, cp_rank=rank) for rank in files}
                target.put("draft_token_mask", weights, ahead)
        if len(rows) == 0:
            for name in ("target_ids", *(["draft_token_mask"] if self.contents.has_mask else [])):
                target.leave_zero(name)

    def _sample_weights(self, name: str, block: Tensor, rows: Any) -> Tensor | None:
        bad = _first_row_not_finite(block)
        if bad is not None:
            path, row = self.batch.file_of(int(rows[bad]))
            raise InputError(
                f"{path}: {name} has a value that is not finite in row {row}; "
                "a mask holds finite weights, 0 to leave a token out"
            )
        sample = self.batch.sample_mask()
        return None if sample is None else sample[torch.from_numpy(rows)]

    def _write_positions(
        self, files: Mapping[int, TensorFileWriter], part: PackedLayout, base: int
    ) -> None:
        step = max(1, self.max_memory // 64)  # int64 positions and their intermediates
        for first in range(0, part.local_total, step):
            stop = min(first + step, part.local_total)
            for rank, file in files.items():
                ids = pack_positions(part, cp_rank=rank, start=first, stop=stop)
                file.write("position_ids", ids[None], 0, base + first)


@dataclass(frozen=True, slots=True)
class _Target:
    """The slots that a part of the layout has in every rank's file."""

    files: Mapping[int, TensorFileWriter]
    part: PackedLayout
    base: int
    columns: slice | None

    def put(self, name: str, block: Tensor, pieces: Mapping[int, Pieces]) -> None:
        """Fill one tensor's slots from a block of whole rows, or of one row's columns."""
        for rank, file in self.files.items():
            if self.columns is None:
                packed = fill_pieces(block, pieces[rank], self.part.local_total)
                file.write(name, packed[None], 0, self.base)
            else:
                self._put_columns(file, name, block, pieces[rank], self.columns)

    def _put_columns(
        self,
        file: TensorFileWriter,
        name: str,
        block: Tensor,
        pieces: Pieces,
        columns: slice,
    ) -> None:
        mine = pieces.clip(columns.start, columns.stop)
        for dst, position, count in zip(
            mine.dst.tolist(), mine.position.tolist(), mine.count.tolist(), strict=True
        ):
            at = position - columns.start
            file.write(name, block[:, at : at + count].contiguous(), 0, self.base + dst)
        if columns.start == 0:
            filled = int(pieces.count.sum())
            file.leave_zero(name, (self.part.local_total - filled) * block[0, 0].numel())

    def leave_zero(self, name: str) -> None:
        """All of the part's slots of this tensor stay zero."""
        for file in self.files.values():
            per_slot = math.prod(file.shape(name)[2:])
            file.leave_zero(name, self.part.local_total * per_slot)


def _first_row_not_finite(block: Tensor) -> int | None:
    """The first row of [rows, ...] with a NaN or an infinity."""
    # A sum in float64 is finite only where every value is: one pass and no copy as a rule.
    if not block.is_floating_point() or math.isfinite(float(block.sum(dtype=torch.float64))):
        return None
    bad = (~torch.isfinite(block)).flatten(1).any(dim=1).nonzero()
    return int(bad[0]) if len(bad) else None


def _rows(index: Any) -> Any:
    """A slice for neighbouring rows, so that they are read in one go."""
    if (
        len(index)
        and int(index[-1]) - int(index[0]) == len(index) - 1
        and (np.diff(index) == 1).all()
    ):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index
