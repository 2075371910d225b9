"""``opdtool reconstruct``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from opdtool.cli.options import (
    CpOption,
    DeviceOption,
    ExitZeroOption,
    ForceOption,
    Format,
    FormatOption,
    MaxMemoryOption,
    QuietOption,
    Ranks,
    RanksOption,
    RenameOption,
    ReportOption,
    TimeoutOption,
    TpOption,
    parse_renames,
    parse_size,
)


class Payload(StrEnum):
    """What the payload is."""

    AUTO = "auto"
    HIDDEN_STATES = "hidden_states"
    LOGITS = "logits"


class ComputeDtype(StrEnum):
    """Dtypes that products can be computed in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Tolerance(StrEnum):
    """How the tolerance is found."""

    AUTO = "auto"


_MODEL = "Model"
_COMPARE = "Comparison"


def command(
    payload: Annotated[
        Path,
        typer.Argument(
            metavar="PAYLOAD", help="teacher_full_hidden_states or teacher_full_logits, in a file."
        ),
    ],
    head: Annotated[
        list[str],
        typer.Option(
            "--head",
            metavar="[INDEX=]PATH[:KEY]",
            help="A teacher's output layer: a checkpoint or a file. Repeatable.",
            rich_help_panel=_MODEL,
        ),
    ] = [],  # noqa: B006
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Write every rank's logits here."),
    ] = None,
    payload_kind: Annotated[
        Payload, typer.Option("--payload", help="What the payload is; auto goes by its name.")
    ] = Payload.AUTO,
    tp: TpOption = None,
    cp: CpOption = None,
    norm: Annotated[
        list[str],
        typer.Option(
            "--norm",
            metavar="[INDEX=]PATH[:KEY]",
            help="Apply that teacher's final RMSNorm first. Repeatable.",
            rich_help_panel=_MODEL,
        ),
    ] = [],  # noqa: B006
    norm_eps: Annotated[
        float | None,
        typer.Option("--norm-eps", help="Its epsilon; else config.json's.", rich_help_panel=_MODEL),
    ] = None,
    norm_offset: Annotated[
        int,
        typer.Option(
            "--norm-offset",
            min=0,
            max=1,
            help="1 for models that store the norm's weight less one.",
            rich_help_panel=_MODEL,
        ),
    ] = 0,
    logit_scale: Annotated[
        float | None,
        typer.Option(
            "--logit-scale", help="Multiplies the logits behind the head.", rich_help_panel=_MODEL
        ),
    ] = None,
    logit_softcap: Annotated[
        float | None,
        typer.Option(
            "--logit-softcap",
            metavar="CAP",
            help="CAP * tanh(logit / CAP) behind the head.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    pad_vocab: Annotated[
        int,
        typer.Option(
            "--pad-vocab-to-multiple-of",
            min=1,
            help="Pad heads with zero rows.",
            rich_help_panel=_MODEL,
        ),
    ] = 1,
    student_seq_len: Annotated[
        int | None,
        typer.Option("--student-seq-len", min=1, help="The student's padded length, all ranks."),
    ] = None,
    packed: Annotated[
        bool,
        typer.Option("--packed", help="The payload is a pack [1, T, H] with cu_seqlens_padded."),
    ] = False,
    compute_dtype: Annotated[
        ComputeDtype | None,
        typer.Option(
            "--compute-dtype",
            help="Dtype of the product and the output; else the head's.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    d2t: Annotated[
        Path | None,
        typer.Option("--d2t", metavar="FILE", help="Rebuild the draft vocabulary's columns alone."),
    ] = None,
    reference: Annotated[
        list[Path],
        typer.Option(
            "--reference",
            metavar="FILE_OR_SHARDS",
            help="Recorded teacher logits to compare with: a file, shards, or a directory.",
            rich_help_panel=_COMPARE,
        ),
    ] = [],  # noqa: B006
    tolerance: Annotated[
        Tolerance,
        typer.Option(
            "--tolerance",
            help="auto: the bound that right logits meet.",
            rich_help_panel=_COMPARE,
        ),
    ] = Tolerance.AUTO,
    rtol: Annotated[
        float | None,
        typer.Option("--rtol", help="Relative tolerance instead.", rich_help_panel=_COMPARE),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option("--atol", help="Absolute tolerance instead.", rich_help_panel=_COMPARE),
    ] = None,
    logprobs: Annotated[
        Path | None,
        typer.Option(
            "--logprobs",
            metavar="FILE",
            help="Recorded log-probabilities of the tokens to compare with: [B, S], [B, S-1], "
            "or a pack's [1, T].",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    student: Annotated[
        list[Path],
        typer.Option(
            "--student",
            metavar="FILE_OR_SHARDS",
            help="Student logits to take divergences of.",
            rich_help_panel=_COMPARE,
        ),
    ] = [],  # noqa: B006
    batch: Annotated[
        list[Path],
        typer.Option(
            "--batch",
            metavar="FILE",
            help="Masks and tokens, where the payload's file does not hold them; rows count on "
            "through several files.",
            rich_help_panel=_COMPARE,
        ),
    ] = [],  # noqa: B006
    rename: RenameOption = [],  # noqa: B006
    force: ForceOption = False,
    device: DeviceOption = "auto",
    max_memory: MaxMemoryOption = "1GiB",
    ranks: RanksOption = Ranks.SIMULATED,
    timeout: TimeoutOption = 300.0,
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Rebuild teacher logits from hidden states, rank by rank, and prove they are the teacher's."""
    from opdtool.cli.emit import Output, emit

    told = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)

    import torch

    from opdtool.io.checkpoints import parse_head_specs
    from opdtool.jobs.reconstruct.job import ReconstructJob
    from opdtool.jobs.reconstruct.run import run

    job = ReconstructJob(
        payload=payload,
        heads=parse_head_specs(head),
        norms={spec.index: spec for spec in parse_head_specs(norm, "--norm")},
        norm_eps=norm_eps,
        norm_offset=float(norm_offset),
        output=output,
        kind=payload_kind.value,
        tp=tp,
        cp=cp,
        scale=logit_scale,
        softcap=logit_softcap,
        pad_vocab=pad_vocab,
        student_seq_len=student_seq_len,
        packed=packed,
        compute=None if compute_dtype is None else getattr(torch, compute_dtype.value),
        d2t=d2t,
        reference=reference,
        student=student,
        logprobs=logprobs,
        batch=batch,
        rtol=rtol,
        atol=atol,
        rename=parse_renames(rename),
        force=force,
        max_memory=parse_size(max_memory),
        device=device,
        ranks=ranks.value,
        timeout=timeout,
    )
    emit(run(job), told)
