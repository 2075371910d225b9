"""``opdtool unpack``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opdtool.cli.options import (
    ForceOption,
    MaxMemoryOption,
    QuietOption,
    parse_size,
)
from opdtool.core.words import plural


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `opdtool pack` wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The batch.")],
    force: ForceOption = False,
    max_memory: MaxMemoryOption = "1GiB",
    quiet: QuietOption = False,
) -> None:
    """Restore the padded batch from a pack; rows in their first order, padding zero."""
    from opdtool.io.unpacks import PackDirectory, unpack
    from opdtool.io.writer import check_output

    check_output(output, force=force)
    packs = PackDirectory.open(directory)
    written = unpack(packs, output, force=force, max_memory=parse_size(max_memory))
    if quiet:
        return
    print(
        f"wrote {output}: {packs.rows:,} rows of width {packs.width:,}, "
        f"{plural(written.size, 'byte', ',')}"
    )
    dropped = packs.manifest.extra.get("dropped_rows")
    if dropped:
        print(f"rows left out by --drop-empty are zero: {', '.join(map(str, dropped))}")
