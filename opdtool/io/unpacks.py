"""Reading packs back: a directory of packs into the padded batch it came from.

Legend: B batch rows, S row width, T packed slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Ints
from opdtool.core.packing import gather_cp
from opdtool.core.packing import unpack as unpack_rows
from opdtool.core.words import plural
from opdtool.io.manifest import Manifest, read_manifest
from opdtool.io.packs import pack_name
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.io.verify import verify_files
from opdtool.io.writer import TensorFileWriter, TensorSpec, WrittenFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PackDirectory:
    """A directory that ``opdtool pack`` wrote, its files checked against the manifest."""

    path: Path
    manifest: Manifest
    rows: int
    width: int
    cp_size: int
    microbatches: int
    token_aligned: tuple[str, ...]
    row_aligned: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> PackDirectory:
        """Read the manifest and check every file's size and sha256 against it.

        Raises:
            InputError: no pack, or a file that is not the one the manifest speaks of.
        """
        manifest = read_manifest(path)
        batch, extra = manifest.batch, manifest.extra
        if manifest.kind != "pack" or batch is None:
            raise InputError(f"{path}: its manifest is of a {manifest.kind}; expected a pack")
        problems = verify_files(path, manifest)
        if problems:
            raise InputError(f"{path / problems[0].file}: {problems[0].message}; pack again")
        cp_size, microbatches = manifest.geometry.get("cp"), extra.get("microbatches")
        dropped = extra.get("dropped_rows", [])
        names: list[Any] = [extra.get("token_aligned"), extra.get("row_aligned")]
        if (
            not _is_size(cp_size)
            or not _is_size(microbatches)
            or not all(_is_list(each, str) for each in names)
            or not _is_list(dropped, int)
            or len({*names[0], *names[1]}) != len(names[0]) + len(names[1])
        ):
            raise InputError(
                f"{path}/manifest.json: cp, microbatches, token_aligned, row_aligned or "
                "dropped_rows is missing or malformed; pack again"
            )
        # Counted before anything is made of these numbers: they may be anything.
        if len(manifest.files) != cp_size * microbatches:
            raise InputError(
                f"{path}/manifest.json: lists {plural(len(manifest.files), 'file')} for "
                f"{microbatches} "
                f"microbatches and cp {cp_size}; pack again"
            )
        return cls(
            path=path,
            manifest=manifest,
            rows=batch[0],
            width=batch[1],
            cp_size=cp_size,
            microbatches=microbatches,
            token_aligned=tuple(extra["token_aligned"]),
            row_aligned=tuple(extra["row_aligned"]),
        )

    def shards(self, microbatch: int) -> list[Path]:
        """The files of one microbatch, in rank order."""
        return [
            self.path / pack_name(microbatch, rank, self.cp_size) for rank in range(self.cp_size)
        ]


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def unpack(packs: PackDirectory, output: Path, *, force: bool, max_memory: int) -> WrittenFile:
    """Write the padded batch that the packs hold; rows in their first order, padding zero.

    Raises:
        InputError: a pack that contradicts its manifest, or an output that cannot be written.
    """
    with open_tensors(packs.shards(0)[:1]) as first:
        specs = [
            TensorSpec(
                name, first.info(name).dtype, (packs.rows, packs.width, *first.info(name).shape[2:])
            )
            for name in packs.token_aligned
        ] + [
            TensorSpec(name, first.info(name).dtype, (packs.rows, *first.info(name).shape[1:]))
            for name in packs.row_aligned
        ]
    with TensorFileWriter(output, specs, force=force) as out:
        restored: set[int] = set()
        for microbatch in range(packs.microbatches):
            with ExitStack() as stack:
                shards = [
                    stack.enter_context(open_tensors([path])) for path in packs.shards(microbatch)
                ]
                layout = _layout(packs, shards, specs)
                _restore(packs, restored, layout.sequence_index)
                _unpack_microbatch(packs, layout, shards, out, max_memory)
        left = packs.rows - len(restored)
        for spec in specs:  # rows that were dropped when packing stay zero
            out.leave_zero(spec.name, left * math.prod(spec.shape[1:]))
        return out.finish()


def _layout(
    packs: PackDirectory, shards: list[TensorSource], specs: list[TensorSpec]
) -> PackedLayout:
    """The layout of one microbatch, once its files are seen to fit it and the batch."""
    first = shards[0]
    layout = PackedLayout.from_cu_seqlens(
        *(first.read(name) for name in ("cu_seqlens", "cu_seqlens_padded")),
        cp_size=packs.cp_size,
        sequence_index=first.read("sequence_index"),
    )
    index, lengths = layout.sequence_index, layout.lengths[: layout.num_rows]
    if len(index) and (index.min() < 0 or index.max() >= packs.rows):
        raise InputError(
            f"{first.paths[0]}: sequence_index names rows {index.min()}..{index.max()} of a batch "
            f"that has {packs.rows} by its manifest; pack again"
        )
    if len(lengths) and lengths.max() > packs.width:
        raise InputError(
            f"{first.paths[0]}: sequence {int(lengths.argmax())} has "
            f"{plural(lengths.max(), 'token')} in a "
            f"batch of width {packs.width} by its manifest; pack again"
        )
    for spec in specs:
        token = spec.name in packs.token_aligned
        lead = (1, layout.local_total) if token else (layout.num_rows,)
        shape = (*lead, *spec.shape[2 if token else 1 :])
        for shard in shards:
            info = shard.info(spec.name)
            if (info.dtype, info.shape) != (spec.dtype, shape):
                raise InputError(
                    f"{shard.paths[0]}: {spec.name} is {info.dtype} {list(info.shape)}; "
                    f"{spec.dtype} {list(shape)} was expected; pack again"
                )
    return layout


def _restore(packs: PackDirectory, restored: set[int], rows: Ints) -> None:
    """Note the rows of one microbatch, none of which another one may have held."""
    for row in rows.tolist():
        if row in restored:
            raise InputError(f"{packs.path}: row {row} is packed twice; pack again")
        restored.add(row)


def _unpack_microbatch(
    packs: PackDirectory,
    layout: PackedLayout,
    shards: list[TensorSource],
    out: TensorFileWriter,
    max_memory: int,
) -> None:
    """Write one microbatch's rows."""
    first = shards[0]
    for name in packs.row_aligned:
        values = first.read(name)
        for start, stop in _runs(layout.sequence_index, 0, layout.num_rows):
            out.write(name, values[start:stop], int(layout.sequence_index[start]))
    for name in packs.token_aligned:
        tail = first.info(name).shape[2:]
        slot_bytes = first.info(name).itemsize * int(np.prod(tail))
        slots = max(1, max_memory // (8 * max(slot_bytes, 8)))
        for start, stop in _blocks(layout, packs.width, slots):
            part, base = layout.part(start, stop), layout.local_start(start)
            if max(part.total, packs.width) > slots and stop == start + 1:
                _unpack_row(shards, out, name, part, base, slots)
                continue
            local = slice(base, base + part.local_total)
            pieces = [shard.read(name, slice(0, 1), local)[0] for shard in shards]
            whole = gather_cp(pieces, part)
            row = int(part.sequence_index[0])
            local_rows = PackedLayout(
                cu_seqlens=part.cu_seqlens,
                cu_seqlens_padded=part.cu_seqlens_padded,
                cp_size=part.cp_size,
                sequence_index=part.sequence_index - row,
            )
            block = unpack_rows(whole, local_rows, rows=stop - start, width=packs.width)
            out.write(name, block, row)


def _unpack_row(
    shards: list[TensorSource],
    out: TensorFileWriter,
    name: str,
    part: PackedLayout,
    base: int,
    slots: int,
) -> None:
    """Write one row that alone is more than the memory, a stretch of ``slots`` at a time."""
    row = int(part.sequence_index[0])
    for rank, shard in enumerate(shards):
        pieces = part.pieces(rank)
        for dst, position, count in zip(
            pieces.dst.tolist(), pieces.position.tolist(), pieces.count.tolist(), strict=True
        ):
            for first in range(0, count, slots):
                last = min(first + slots, count)
                local = slice(base + dst + first, base + dst + last)
                out.write(name, shard.read(name, slice(0, 1), local), row, position + first)
    _, width, *tail = out.shape(name)
    out.leave_zero(name, (width - int(part.lengths[0])) * math.prod(tail))


def _runs(index: Ints, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges of segments in [start, stop) whose rows are neighbours in the batch."""
    breaks = np.flatnonzero(np.diff(index[start:stop]) != 1) + 1 + start
    edges = [start, *breaks.tolist(), stop]
    return ((a, b) for a, b in pairwise(edges) if b > a)


def _blocks(layout: PackedLayout, width: int, slots: int) -> Iterator[tuple[int, int]]:
    """Ranges of segments, their rows neighbours in the batch, that fit into ``slots`` slots."""
    per_row = np.maximum(layout.padded_lengths[: layout.num_rows], width)
    for start, stop in _runs(layout.sequence_index, 0, layout.num_rows):
        while start < stop:
            room = np.searchsorted(np.cumsum(per_row[start:stop]), slots, side="right")
            end = start + max(1, int(room))
            yield start, min(end, stop)
            start = end
