"""``opdtool roll``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opdtool.cli.options import ForceOption, QuietOption, RenameOption, parse_renames
from opdtool.core.errors import InputError

if TYPE_CHECKING:
    from opdtool.io.tensors import TensorSource


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pack with cu_seqlens_padded.")],
    name: Annotated[str, typer.Option("--name", help="The packed tensor to shift.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")],
    rename: RenameOption = [],  # noqa: B006
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Shift a packed tensor left by one inside each segment; each last slot becomes zero.

    The segments are those of the file's cu_seqlens_padded. Tensors of shape [T], [1, T] and
    [1, T, ...] are shifted along T; cu_seqlens and cu_seqlens_padded are written along.
    """
    from opdtool.core.packing import roll_packed_seq_dim
    from opdtool.io.tensors import open_tensors
    from opdtool.io.writer import check_output, save_tensors

    check_output(output, force=force)
    with open_tensors([file], rename=parse_renames(rename)) as source:
        shape = source.info(name).shape
        dim = _sequence_dim(source, name)
        offsets = source.read("cu_seqlens_padded")
        if offsets.ndim != 1 or offsets.is_floating_point():
            raise InputError(
                f"{file}: cu_seqlens_padded has shape {list(offsets.shape)} and dtype "
                f"{offsets.dtype}; expected [N+1] integers"
            )
        tensors = {
            other: source.read(other)
            for other in ("cu_seqlens", "cu_seqlens_padded")
            if other in source
        }
        try:
            tensors[name] = roll_packed_seq_dim(source.read(name), offsets, dim)
        except InputError as error:
            raise InputError(f"{file}: {name} {list(shape)}: {error}") from None
    save_tensors(output, tensors, force=force)
    if not quiet:
        print(f"wrote {output}: {name} {list(shape)} shifted left by one in each segment")


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
