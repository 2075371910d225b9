"""``opdtool verify-mask``."""

from __future__ import annotations

from enum import StrEnum
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
    SequenceParallelOption,
    TailOption,
    TimeoutOption,
    TpOption,
    parse_renames,
    parse_size,
)
from opdtool.core.errors import InputError
from opdtool.jobs.geometry import GeometryOptions
from opdtool.jobs.ranked import dump_sizes


class Convention(StrEnum):
    """Which token slot t speaks of."""

    ROLLED = "rolled"
    UNSHIFTED = "unshifted"


def command(
    dump: Annotated[
        list[Path],
        typer.Argument(
            metavar="DUMP...",
            help="The mask: one file, one a context-parallel rank, or a directory of packs.",
        ),
    ],
    batch: Annotated[
        list[Path],
        typer.Option("--batch", help="The padded batch it was made from. Repeatable."),
    ],
    mask_name: Annotated[
        str, typer.Option("--mask-name", help="The mask's name in the dump.")
    ] = "draft_token_mask",
    convention: Annotated[
        Convention,
        typer.Option(help="rolled: slot t speaks of token t+1. unshifted: of token t."),
    ] = Convention.ROLLED,
    shift: Annotated[
        int | None,
        typer.Option("--shift", min=1, help="Slot t speaks of token t+N (multi-step drafts)."),
    ] = None,
    atol: Annotated[float, typer.Option("--atol", help="How far a value may be off.")] = 0.0,
    cp: CpOption = None,
    tp: TpOption = None,
    sequence_parallel: SequenceParallelOption = None,
    pad_multiple: PadMultipleOption = None,
    fp8: Fp8Option = None,
    pad_packed_multiple: PadPackedMultipleOption = None,
    pad_packed_to: PadPackedToOption = None,
    tail: TailOption = None,
    rename: RenameOption = [],  # noqa: B006
    ranks: RanksOption = Ranks.SIMULATED,
    timeout: TimeoutOption = 300.0,
    device: DeviceOption = "auto",
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a draft-loss mask from any framework, and name the mistake in it."""
    from opdtool.cli.emit import Output, emit
    from opdtool.jobs.verify_mask import VerifyMaskJob, verify_mask
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
    if convention is Convention.UNSHIFTED and shift is not None:
        raise InputError(
            f"--shift {shift} with --convention unshifted: an unshifted mask has no shift; "
            "leave one of them out"
        )
    job = VerifyMaskJob(
        dump=tuple(dump),
        batch=tuple(batch),
        mask_name=mask_name,
        shift=0 if convention is Convention.UNSHIFTED else shift or 1,
        atol=atol,
        geometry=options,
        rename=parse_renames(rename),
        device=device,
        max_memory=parse_size(max_memory),
    )
    tp_size, cp_size = dump_sizes(dump, tp, cp)
    with open_ranks(
        ranks.value, tp_size=tp_size, cp_size=cp_size, timeout=timeout, device=device
    ) as world:
        emit(verify_mask(job, world), told)
