"""``opdtool build-mask``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opdtool.cli.options import (
    CpOption,
    DeviceOption,
    ForceOption,
    Fp8Option,
    MaxMemoryOption,
    PadMultipleOption,
    PadPackedMultipleOption,
    PadPackedToOption,
    QuietOption,
    RenameOption,
    SequenceParallelOption,
    TailOption,
    TpOption,
    parse_renames,
    parse_size,
)
from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.jobs.batch_errors import naming_batch
from opdtool.jobs.geometry import GeometryOptions, pack_geometry

if TYPE_CHECKING:
    from opdtool.core.layout import PackedLayout
    from opdtool.io.batch import Batch
    from opdtool.io.writer import TensorFileWriter, TensorSpec

SUFFIX = ".safetensors"
MASK = "draft_token_mask"


def command(
    batch: Annotated[
        list[Path], typer.Argument(metavar="BATCH...", help="The padded batch; one or more files.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to write; with CP > 1 one FILE.cpRofN.safetensors a rank.",
        ),
    ],
    cp: CpOption = None,
    tp: TpOption = None,
    sequence_parallel: SequenceParallelOption = None,
    pad_multiple: PadMultipleOption = None,
    fp8: Fp8Option = None,
    pad_packed_multiple: PadPackedMultipleOption = None,
    pad_packed_to: PadPackedToOption = None,
    tail: TailOption = None,
    drop_empty: Annotated[
        bool, typer.Option("--drop-empty", help="Leave rows of length 0 out.")
    ] = False,
    rename: RenameOption = [],  # noqa: B006
    force: ForceOption = False,
    device: DeviceOption = "auto",
    max_memory: MaxMemoryOption = "1GiB",
    quiet: QuietOption = False,
) -> None:
    """Build the shifted draft-loss mask."""
    from opdtool.jobs.device import resolve_device

    resolve_device(device)  # masks are moved from file to file: no device is faster at it
    options = GeometryOptions(
        cp=cp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        pad_multiple=pad_multiple,
        fp8=fp8 and fp8.value,
        pad_packed_multiple=pad_packed_multiple,
        pad_packed_to=pad_packed_to,
        tail=tail and tail.value,
    )
    job = BuildMaskJob(
        batch=tuple(batch),
        output=output,
        geometry=options,
        drop_empty=drop_empty,
        rename=parse_renames(rename),
        force=force,
        max_memory=parse_size(max_memory),
    )
    written = run(job)
    if quiet:
        return
    for path in written.paths:
        print(f"wrote {path}")
    layout = written.layout
    print(
        f"{plural(layout.num_rows, 'sequence', ',')} in {plural(layout.total, 'slot', ',')}, "
        f"{written.trained:,} of "
        f"{layout.real_tokens:,} real tokens trained"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildMaskJob:
    """All that ``opdtool build-mask`` was asked to do."""

    batch: Sequence[Path]
    output: Path
    geometry: GeometryOptions = field(default_factory=GeometryOptions)
    drop_empty: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    max_memory: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltMask:
    """What was written: the files in rank order, their layout, and how many slots train."""

    paths: tuple[Path, ...]
    layout: PackedLayout
    trained: int


def mask_paths(output: Path, cp_size: int) -> tuple[Path, ...]:
    """The files of a mask: FILE itself, or one ``STEM.cpRofN.safetensors`` a rank.

    Raises:
        InputError: a name that does not end in .safetensors.
    """
    if output.suffix != SUFFIX:
        raise InputError(
            f"{output}: the mask is written as safetensors; name it {output.stem}{SUFFIX}"
        )
    if cp_size == 1:
        return (output,)
    stem = output.name.removesuffix(SUFFIX)
    return tuple(output.with_name(f"{stem}.cp{rank}of{cp_size}{SUFFIX}") for rank in range(cp_size))


def run(job: BuildMaskJob) -> BuiltMask:
    """Write the mask.

    Raises:
        InputError: the batch has no masks or rows of length 0, the geometry cannot be met, or
            the output exists or cannot be written.
    """
    from contextlib import ExitStack

    import numpy as np

    from opdtool.core.plan import BinOptions, plan_packs
    from opdtool.io.batch import open_batch
    from opdtool.io.fileset import FileSet, recover
    from opdtool.io.writer import TensorFileWriter, check_output

    geometry = pack_geometry(job.geometry.resolve())
    paths = mask_paths(job.output, geometry.cp_size)
    recover(job.output)
    for path in paths:
        check_output(path, force=job.force)
    with open_batch(job.batch, rename=job.rename) as batch:
        batch.token_mask(slice(0, 0))  # there is one, and it is [B,S]
        with naming_batch(batch):
            plan = plan_packs(batch.lengths, geometry, BinOptions(), drop_empty=job.drop_empty)
        layout = plan.layout(0)
        if layout.total > np.iinfo(np.int32).max:
            raise InputError(
                f"the mask has {plural(layout.total, 'slot')}, more than int32 cumulative lengths "
                "can "
                "count; split the batch: opdtool pack --max-tokens"
            )
        specs = _specs(batch, layout)
        if paths == (job.output,):
            with TensorFileWriter(job.output, specs, force=job.force) as file:
                trained = _write(batch, layout, [file], job.max_memory)
        else:
            with FileSet(job.output, paths, force=job.force) as out, ExitStack() as stack:
                files = [stack.enter_context(out.tensor_file(path, specs)) for path in paths]
                trained = _write(batch, layout, files, job.max_memory)
                out.finish()
    return BuiltMask(paths=paths, layout=layout, trained=trained)


def _specs(batch: Batch, layout: PackedLayout) -> list[TensorSpec]:
    import torch

    from opdtool.io.writer import TensorSpec, dtype_code

    dtype = batch.info("token_mask").torch_dtype
    sample = batch.sample_mask()
    if sample is not None:
        dtype = torch.promote_types(dtype, sample.dtype)
    entries = layout.num_segments + 1
    return [
        TensorSpec(MASK, dtype_code(dtype), (1, layout.local_total)),
        TensorSpec("cu_seqlens", "I32", (entries,)),
        TensorSpec("cu_seqlens_padded", "I32", (entries,)),
        TensorSpec("sequence_index", "I64", (layout.num_rows,)),
    ]


def _write(
    batch: Batch, layout: PackedLayout, files: Sequence[TensorFileWriter], max_memory: int
) -> int:
    """Fill every rank's file in blocks of sequences; returns how many slots have weight."""
    import numpy as np
    import torch

    from opdtool.checks.masks import neighbours, segment_blocks
    from opdtool.checks.room import Room
    from opdtool.core.masks import draft_token_mask, token_weights

    small = {
        "cu_seqlens": torch.from_numpy(layout.cu_seqlens.astype(np.int32)),
        "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded.astype(np.int32)),
        "sequence_index": torch.from_numpy(layout.sequence_index),
    }
    for file in files:
        for name, values in small.items():
            file.write(name, values)
    sample, trained, room = batch.sample_mask(), 0, Room.within(max_memory)
    for start, stop in segment_blocks(layout, batch.width, room.values):
        part, base = layout.part(start, stop), layout.local_start(start)
        if max(part.total, batch.width) > room.long:
            trained += _write_long(batch, part, base, files, room.values)
            continue
        rows = part.sequence_index
        block = batch.token_mask(neighbours(rows))
        weights = token_weights(block, None if sample is None else sample[torch.from_numpy(rows)])
        for rank, file in enumerate(files):
            mask = draft_token_mask(weights, part, cp_rank=rank)
            trained += int((mask != 0).sum())
            file.write(MASK, mask.unsqueeze(0), 0, base)
    return trained


def _write_long(
    batch: Batch, part: PackedLayout, base: int, files: Sequence[TensorFileWriter], step: int
) -> int:
    """Fill every rank's share of one sequence that is too long to be held, some columns of its
    row at a time; what no column fills stays zero. Returns how many slots have weight."""
    from opdtool.core.masks import draft_pieces, token_weights

    first_row = int(part.sequence_index[0]) if part.num_rows else 0
    row = slice(first_row, first_row + part.num_rows)  # none, where it is a tail
    sample = batch.sample_mask()
    kept = None if sample is None else sample[row]
    pieces = [draft_pieces(part, cp_rank=rank, limit=batch.width) for rank in range(len(files))]
    for file, filled in zip(files, pieces, strict=True):
        file.leave_zero(MASK, part.local_total - int(filled.count.sum()))
    trained = 0
    for first in range(0, batch.width if part.num_rows else 0, step):
        columns = slice(first, min(first + step, batch.width))
        weights = token_weights(batch.token_mask(row, columns), kept)[0]
        for file, filled in zip(files, pieces, strict=True):
            here = filled.clip(columns.start, columns.stop)
            for to, at, count in zip(here.dst, here.position, here.count, strict=True):
                run = weights[at - first : at - first + count]
                trained += int((run != 0).sum())
                file.write(MASK, run.unsqueeze(0), 0, base + int(to))
    return trained
