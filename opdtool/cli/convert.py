"""``opdtool convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opdtool.cli.options import ForceOption, QuietOption
from opdtool.core.errors import InputError
from opdtool.core.words import plural


def command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt, .pth, .bin or .ckpt file.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Default: beside FILE, as .safetensors."
        ),
    ] = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Turn a torch file into safetensors: tensors alone, nested names joined with dots."""
    if not path.name:
        raise InputError(f"{path}: is no file; give a .pt, .pth, .bin or .ckpt file")
    target = output or path.with_suffix(".safetensors")
    from opdtool.io.convert import convert

    written = convert(path, target, force=force)
    if not quiet:
        tensors = plural(len(written.tensors), "tensor", ",")
        print(f"wrote {target}: {tensors}, {plural(written.size, 'byte', ',')}")
