"""``opdtool build-d2t``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opdtool.cli.options import (
    DeviceOption,
    ExitZeroOption,
    ForceOption,
    Format,
    FormatOption,
    MaxMemoryOption,
    QuietOption,
    RenameOption,
    ReportOption,
    parse_renames,
    parse_size,
)
from opdtool.core.errors import InputError
from opdtool.findings import Bars, Report, Section, Table

if TYPE_CHECKING:
    from torch import Tensor

    from opdtool.jobs.token_counts import Counted


class Count(StrEnum):
    """Which tokens are counted."""

    TRAINED = "trained"
    ALL = "all"


def command(
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...", help="Batch files, or counts vectors [V] (.npy or safetensors)."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option("--draft-vocab-size", min=1, metavar="D", help="Draft ids.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", min=1, metavar="V", help="Target ids; a counts vector's own."),
    ] = None,
    must_include: Annotated[
        str, typer.Option("--must-include", metavar="ID,ID", help="Ids that are always in.")
    ] = "",
    count: Annotated[
        Count, typer.Option("--count", help="Trained tokens, or all real tokens.")
    ] = Count.TRAINED,
    sweep: Annotated[
        str,
        typer.Option(
            "--sweep",
            metavar="D,D",
            help="Show the coverage of these sizes; nothing is written without -o.",
        ),
    ] = "",
    rename: RenameOption = [],  # noqa: B006
    force: ForceOption = False,
    device: DeviceOption = "auto",
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Choose a draft vocabulary: the D most frequent trained tokens, as d2t and t2d.

    Ties go to the lower id. --sweep shows what share of the tokens each size keeps.
    """
    from opdtool.cli.emit import Output, emit
    from opdtool.jobs.device import resolve_device

    to = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    job = BuildJob(
        sources=tuple(source),
        output=output,
        draft_vocab_size=draft_vocab_size,
        vocab_size=vocab_size,
        must_include=parse_ids(must_include, "--must-include"),
        everything=count is Count.ALL,
        sweep=parse_ids(sweep, "--sweep"),
        rename=parse_renames(rename),
        force=force,
        max_memory=parse_size(max_memory),
        device=str(resolve_device(device)),
    )
    emit(run(job), to)


def parse_ids(text: str, option: str) -> tuple[int, ...]:
    """The numbers in ``1,2,3``, in their order, each once.

    Raises:
        InputError: something between the commas is no number that is not negative.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if not (word.isascii() and word.isdigit()) or len(word) > 18:
            raise InputError(f"{option} {text!r}: {word!r} is no id; write {option} 1,2,3")
    return tuple(dict.fromkeys(int(word) for word in words))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildJob:
    """All that ``opdtool build-d2t`` was asked to do."""

    sources: Sequence[Path]
    output: Path | None
    draft_vocab_size: int | None
    vocab_size: int | None = None
    must_include: Sequence[int] = ()
    everything: bool = False
    sweep: Sequence[int] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    max_memory: int = 1 << 30
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.draft_vocab_size is None and self.output and self.sweep:
            raise InputError(
                f"-o {self.output} needs --draft-vocab-size D: a sweep shows the coverage of "
                "sizes and writes no map"
            )
        if self.draft_vocab_size is None and not self.sweep:
            raise InputError("give --draft-vocab-size D, or --sweep D,D to choose one by")
        if self.draft_vocab_size is not None and self.output is None and not self.sweep:
            raise InputError("give -o FILE to write the map to")


def run(job: BuildJob) -> Report:
    """Count, choose, write; returns the report."""
    from opdtool.core.vocab import choose_draft_vocab, coverage, d2t_from_ids, t2d_from_ids
    from opdtool.io.writer import check_output, save_tensors
    from opdtool.jobs.token_counts import count_sources

    if job.output is not None:
        check_output(job.output, force=job.force)
    counted = count_sources(
        job.sources,
        vocab_size=job.vocab_size,
        everything=job.everything,
        rename=job.rename,
        max_memory=job.max_memory,
        device=job.device,
    )
    counted.require_any()

    def choice(size: int) -> tuple[Tensor, float]:
        ids = choose_draft_vocab(counted.counts, size, job.must_include)
        return ids, coverage(counted.counts, ids)

    swept = {size: choice(size)[1] for size in job.sweep}
    ids, kept = choice(job.draft_vocab_size) if job.draft_vocab_size else (None, math.nan)
    if ids is not None and job.output is not None:
        save_tensors(
            job.output,
            {"d2t": d2t_from_ids(ids), "t2d": t2d_from_ids(ids, len(counted.counts))},
            metadata={"coverage": repr(kept)},
            force=job.force,
        )
    return _report(job, counted, swept, ids, kept)


def _report(
    job: BuildJob, counted: Counted, swept: Mapping[int, float], ids: Tensor | None, kept: float
) -> Report:
    V = len(counted.counts)
    seen = int((counted.counts > 0).sum())
    stats: dict[str, Any] = {
        "counted_tokens": counted.total,
        "distinct_ids": seen,
        "ids_outside_vocabulary": counted.outside,
        "sequences": counted.rows,
        "files": len(counted.files),
    }
    rows = [
        ("all real tokens" if job.everything else "trained tokens", f"{counted.total:,}"),
        ("distinct ids", f"{seen:,} of {V:,}"),
    ]
    if ids is not None:
        filled = int((counted.counts[ids] == 0).sum())
        stats |= {"coverage": kept, "never_counted": filled}
        rows += [
            ("draft ids", f"{len(ids):,}"),
            ("of them never counted", f"{filled:,}"),
            ("coverage", f"{kept:.4%}"),
        ]
    sections: list[Section] = [
        Table(
            title="draft vocabulary",
            columns=("figure", "value"),
            rows=tuple(rows),
            numeric=frozenset({"value"}),
        )
    ]
    if swept:
        stats["sweep"] = [
            {"draft_vocab_size": size, "coverage": share} for size, share in swept.items()
        ]
        sections += sweep_pictures(swept, V)
    notes = [f"wrote d2t and t2d to {job.output}"] if job.output is not None else []
    return Report(
        command="build-d2t",
        geometry={"vocab_size": V, "draft_vocab_size": job.draft_vocab_size},
        findings=(counted.finding(),),
        stats=stats,
        sections=tuple(sections),
        notes=tuple(notes),
        inputs=tuple(str(path) for path in job.sources),
    )


def sweep_pictures(swept: Mapping[int, float], V: int) -> tuple[Table, Bars]:
    """Coverage by size, as figures and as bars."""
    table = Table(
        title="coverage by draft vocabulary size",
        columns=("draft ids", "of the vocabulary", "coverage", "tokens outside"),
        rows=tuple(
            (f"{size:,}", f"{size / V:.1%}", f"{share:.4%}", f"{1 - share:.4%}")
            for size, share in swept.items()
        ),
        numeric=frozenset({"draft ids", "of the vocabulary", "coverage", "tokens outside"}),
    )
    bars = Bars(
        title="coverage of trained tokens",
        labels=tuple(f"{size:,}" for size in swept),
        values=tuple(100 * share for share in swept.values()),
        limit=100.0,
        unit="%",
    )
    return table, bars
