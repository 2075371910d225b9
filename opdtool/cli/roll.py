"""``opdtool roll``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opdtool.cli.options import (
    DeviceOption,
    ForceOption,
    MaxMemoryOption,
    QuietOption,
    RenameOption,
    parse_renames,
    parse_size,
)
from opdtool.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opdtool.core.offsets import Ints
    from opdtool.io.tensors import TensorSource

PIECE = 1 << 20
"""Bytes rolled at a time, at most."""


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pack with cu_seqlens_padded.")],
    name: Annotated[str, typer.Option("--name", "--tensor", help="The packed tensor to shift.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")],
    rename: RenameOption = [],  # noqa: B006
    force: ForceOption = False,
    device: DeviceOption = "cpu",
    max_memory: MaxMemoryOption = "1GiB",
    quiet: QuietOption = False,
) -> None:
    """Shift a packed tensor left by one inside each segment; each last slot becomes zero.

    The segments are those of the file's cu_seqlens_padded. Tensors of shape [T], [1, T] and
    [1, T, ...] are shifted along T; cu_seqlens and cu_seqlens_padded are written along.
    """
    from opdtool.core.offsets import as_offsets
    from opdtool.core.packing import rolled_layout
    from opdtool.io.tensors import open_tensors
    from opdtool.io.writer import TensorFileWriter, TensorSpec, check_output
    from opdtool.jobs.device import resolve_device

    on = resolve_device(device)
    piece_bytes = min(PIECE, parse_size(max_memory) // 8)
    check_output(output, force=force)
    with open_tensors([file], rename=parse_renames(rename)) as source:
        info = source.info(name)
        shape = info.shape
        dim = _sequence_dim(source, name)
        offsets = source.read("cu_seqlens_padded")
        if offsets.ndim != 1 or offsets.is_floating_point():
            raise InputError(
                f"{file}: cu_seqlens_padded has shape {list(offsets.shape)} and dtype "
                f"{offsets.dtype}; expected [N+1] integers"
            )
        try:
            rolled_layout(shape, offsets, dim)  # refuses what rolling the whole would
        except InputError as error:
            raise InputError(f"{file}: {name} {list(shape)}: {error}") from None
        others = [each for each in ("cu_seqlens", "cu_seqlens_padded") if each in source]
        infos = [info, *(source.info(other) for other in others if other != name)]
        specs = [TensorSpec(each.name, each.dtype, each.shape) for each in infos]
        with TensorFileWriter(output, specs, force=force) as out:
            for other in others:
                if other != name:
                    out.write(other, source.read(other))
            where = as_offsets(offsets, "cu_seqlens_padded")
            for start, piece in _rolled(source, name, where, dim, piece_bytes, on):
                out.write(name, piece, *[0] * dim, start)
    if not quiet:
        print(f"wrote {output}: {name} {list(shape)} shifted left by one in each segment")


def _rolled(
    source: TensorSource,
    name: str,
    offsets: Ints,
    dim: int,
    piece_bytes: int,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """The rolled tensor in pieces, each with its first slot. A piece is read with the slot
    behind it, which moves into its last one."""
    import numpy as np

    from opdtool.core.packing import roll_packed_seq_dim

    info = source.info(name)
    total = info.shape[dim]
    step = max(1, piece_bytes * total // max(info.nbytes, 1))
    for start in range(0, total, step):
        stop = min(start + step, total)
        read = source.read(name, *[slice(None)] * dim, slice(start, min(stop + 1, total)))
        own = np.unique(np.clip(offsets - start, 0, read.shape[dim]))
        rolled = roll_packed_seq_dim(read.to(device), own, dim)
        yield start, rolled.narrow(dim, 0, stop - start).cpu()


def _sequence_dim(source: TensorSource, name: str) -> int:
    shape = source.info(name).shape
    if len(shape) == 1:
        return 0
    if len(shape) >= 2 and shape[0] == 1:
        return 1
    raise InputError(
        f"{source.path_of(name)}: {name} has shape {list(shape)}; a packed tensor has shape "
        "[T] or [1, T, ...]"
    )
