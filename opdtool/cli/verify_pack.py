"""``opdtool verify-pack``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opdtool.cli.options import (
    CpOption,
    DeviceOption,
    ExitZeroOption,
    Format,
    FormatOption,
    Fp8Option,
    MaxMemoryOption,
    PadMultipleOption,
    PadPackedMultipleOption,
    PadPackedToOption,
    QuietOption,
    Ranks,
    RanksOption,
    RenameOption,
    ReportOption,
    RowAlignedOption,
    SequenceParallelOption,
    TailOption,
    TimeoutOption,
    TpOption,
    parse_renames,
    parse_size,
)
from opdtool.jobs.geometry import GeometryOptions
from opdtool.jobs.ranked import dump_sizes


def command(
    dump: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR_OR_FILES...",
            help="A directory of packs, or one file a context-parallel rank.",
        ),
    ],
    batch: Annotated[
        list[Path],
        typer.Option("--batch", help="The padded batch it was made from. Repeatable."),
    ],
    cp: CpOption = None,
    tp: TpOption = None,
    sequence_parallel: SequenceParallelOption = None,
    pad_multiple: PadMultipleOption = None,
    fp8: Fp8Option = None,
    pad_packed_multiple: PadPackedMultipleOption = None,
    pad_packed_to: PadPackedToOption = None,
    tail: TailOption = None,
    rename: RenameOption = [],  # noqa: B006
    row_aligned: RowAlignedOption = [],  # noqa: B006
    ranks: RanksOption = Ranks.SIMULATED,
    timeout: TimeoutOption = 300.0,
    device: DeviceOption = "auto",
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a pack made by anyone against its batch."""
    from opdtool.cli.emit import Output, emit
    from opdtool.jobs.verify_pack.run import VerifyPackJob, verify_pack
    from opdtool.ranks.launch import open_ranks

    told = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
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
    job = VerifyPackJob(
        dump=tuple(dump),
        batch=tuple(batch),
        geometry=options,
        rename=parse_renames(rename),
        row_aligned=tuple(row_aligned),
        device=device,
        max_memory=parse_size(max_memory),
    )
    tp_size, cp_size = dump_sizes(dump, tp, cp)
    with open_ranks(
        ranks.value, tp_size=tp_size, cp_size=cp_size, timeout=timeout, device=device
    ) as world:
        emit(verify_pack(job, world), told)
