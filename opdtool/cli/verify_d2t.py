"""``opdtool verify-d2t``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opdtool.cli.options import (
    DeviceOption,
    ExitZeroOption,
    Format,
    FormatOption,
    MaxMemoryOption,
    QuietOption,
    RenameOption,
    ReportOption,
    TpOption,
    parse_renames,
    parse_size,
)
from opdtool.core.errors import InputError
from opdtool.core.limits import check_ids, check_ranks
from opdtool.core.words import plural
from opdtool.findings import Bars, Report, Section, Table

if TYPE_CHECKING:
    from opdtool.checks.vocab_case import DraftCase
    from opdtool.jobs.draft_maps import DraftMap
    from opdtool.jobs.token_counts import Counted


OF_MAPS = frozenset({"d2t", "t2d", "lm_head.weight"})
"""Names that --rename speaks of in the map's files; others are of the batches."""


def command(
    draft: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE_OR_CHECKPOINT",
            help="d2t in .safetensors or .npy (t2d may be a second file), or a checkpoint.",
        ),
    ],
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, metavar="V", help="Target ids.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option("--draft-vocab-size", min=1, metavar="D", help="Draft ids.")
    ] = None,
    tp: TpOption = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="config.json to read the sizes from."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="FILE", help="A map or checkpoint that must be equal."),
    ] = None,
    must_include: Annotated[
        str, typer.Option("--must-include", metavar="ID,ID", help="Target ids that must be in.")
    ] = "",
    tokenizer_vocab_size: Annotated[
        int | None,
        typer.Option("--tokenizer-vocab-size", min=1, metavar="N", help="Ids of the tokenizer."),
    ] = None,
    pad_vocab_to_multiple_of: Annotated[
        int,
        typer.Option(
            "--pad-vocab-to-multiple-of",
            min=1,
            metavar="M",
            help="How the target's head is padded.",
        ),
    ] = 1,
    counts: Annotated[
        list[Path],
        typer.Option("--counts", metavar="FILE", help="Counts vector [V]: report the coverage."),
    ] = [],  # noqa: B006
    batch: Annotated[
        list[Path],
        typer.Option("--batch", metavar="FILE", help="Batch: report the coverage of its tokens."),
    ] = [],  # noqa: B006
    count: Annotated[
        str, typer.Option("--count", help="Of batches: trained tokens, or all real tokens.")
    ] = "trained",
    rename: RenameOption = [],  # noqa: B006
    device: DeviceOption = "cpu",
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a draft vocabulary map or a draft checkpoint, and name the mistake in it."""
    from opdtool.cli.build_d2t import parse_ids
    from opdtool.cli.emit import Output, emit
    from opdtool.jobs.device import resolve_device

    to = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    if count not in ("trained", "all"):
        raise InputError(f"--count {count!r} is none; write trained or all")
    job = VerifyJob(
        paths=tuple(draft),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        tp=tp or 1,
        config=config,
        against=against,
        must_include=parse_ids(must_include, "--must-include"),
        tokenizer_size=tokenizer_vocab_size,
        pad_multiple=pad_vocab_to_multiple_of,
        counts=(*counts, *batch),
        everything=count == "all",
        rename=parse_renames(rename),
        device=str(resolve_device(device)),
        max_memory=parse_size(max_memory),
    )
    emit(run(job), to)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob:
    """All that ``opdtool verify-d2t`` was asked to do."""

    paths: Sequence[Path]
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    tp: int = 1
    config: Path | None = None
    against: Path | None = None
    must_include: tuple[int, ...] = ()
    tokenizer_size: int | None = None
    pad_multiple: int = 1
    counts: Sequence[Path] = ()
    everything: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    max_memory: int = 1 << 30

    def __post_init__(self) -> None:
        check_ranks(self.tp, 1)
        for option, ids in (
            ("--vocab-size", self.vocab_size),
            ("--draft-vocab-size", self.draft_vocab_size),
            ("--tokenizer-vocab-size", self.tokenizer_size),
            ("--pad-vocab-to-multiple-of", self.pad_multiple),
        ):
            check_ids(option, ids)
        idle = [name for name in self.rename if name not in OF_MAPS]
        if idle and not self.counts:
            raise InputError(
                f"--rename {idle[0]}={self.rename[idle[0]]}: no input has such a tensor; a map has "
                f"{' and '.join(sorted(OF_MAPS))}"
            )


def run(job: VerifyJob) -> Report:
    """Check the map; returns the report."""
    from opdtool.checks.vocab_case import DraftCase
    from opdtool.checks.vocab_faults import judge_draft_vocab
    from opdtool.core.vocab import ids_from_d2t
    from opdtool.jobs.draft_maps import read_draft_map

    of_map = {name: theirs for name, theirs in job.rename.items() if name in OF_MAPS}
    found = read_draft_map(job.paths, config=job.config, rename=of_map)
    other = None if job.against is None else read_draft_map([job.against])
    case = DraftCase(
        d2t=found.d2t,
        t2d=found.t2d,
        vocab_size=job.vocab_size or found.vocab_size,
        draft_vocab_size=job.draft_vocab_size or found.draft_vocab_size,
        head_rows=found.head[1][0] if found.head and found.head[1] else None,
        tp=job.tp,
        pad_multiple=job.pad_multiple,
        must_include=job.must_include,
        end_ids=found.end_ids,
        against=None if other is None else ids_from_d2t(other.d2t),
        tokenizer_size=job.tokenizer_size,
    )
    findings, diagnosis = judge_draft_vocab(case)
    stats = _stats(case, found)
    sections: list[Section] = [sizes_table(case, job)]
    if job.counts:
        counted = _count(job, case)
        findings.append(counted.finding())
        covered, bars = coverage_of(case, counted)
        stats |= covered
        sections.append(bars)
    return Report(
        command="verify-d2t",
        geometry={"tp": job.tp, "vocab_size": case.targets, "draft_vocab_size": case.entries},
        findings=tuple(findings),
        diagnosis=tuple(diagnosis),
        stats=stats,
        sections=tuple(sections),
        notes=tuple(_notes(job, case, found)),
        inputs=tuple(str(path) for path in job.paths),
    )


def _stats(case: DraftCase, found: DraftMap) -> dict[str, Any]:
    return {
        "vocab_size": case.targets,
        "draft_vocab_size": case.draft_vocab_size,
        "entries": case.entries,
        "tokenizer_vocab_size": case.tokenizer_size,
        "head_rows": case.head_rows,
        "has_t2d": found.t2d is not None,
        "ascending": not bool(case.descents.any()),
        "identity": case.entries == case.targets and not bool((case.offsets != 0).any()),
    }


def _notes(job: VerifyJob, case: DraftCase, found: DraftMap) -> list[str]:
    notes = []
    if found.implied:
        notes.append("no d2t: the draft has the target's whole vocabulary, so the map is identity")
    for option, asked, told in (
        ("--vocab-size", job.vocab_size, found.vocab_size),
        ("--draft-vocab-size", job.draft_vocab_size, found.draft_vocab_size),
    ):
        if asked and told and asked != told:
            notes.append(f"{option} {asked} was taken, not the {told} of {found.config_path}")
    if found.t2d is None and bool(case.descents.any()):
        notes.append("target ids do not ascend: an order by frequency, which is fine without a t2d")
    return notes


def sizes_table(case: DraftCase, job: VerifyJob) -> Table:
    """The tokenizer's, the target's and the padded vocabulary, and the draft's, side by side."""
    # Unless it is said how the head is padded, it is shown as this many ranks would need it.
    multiple = job.pad_multiple if job.pad_multiple > 1 else job.tp
    padded = None if case.targets is None else -(-case.targets // multiple) * multiple
    rows = [
        ("tokenizer", case.tokenizer_size),
        ("target", case.targets),
        (f"target, padded to a multiple of {multiple}", padded),
        ("draft, configured", case.draft_vocab_size),
        ("draft, in d2t", case.entries),
    ]
    return Table(
        title="vocabulary sizes",
        columns=("vocabulary", "ids", "ids a rank", "left over"),
        rows=tuple(
            (name, "-", "-", "-")
            if size is None
            else (name, f"{size:,}", f"{size // job.tp:,}", f"{size % job.tp:,}")
            for name, size in rows
        ),
        numeric=frozenset({"ids", "ids a rank", "left over"}),
    )


def _count(job: VerifyJob, case: DraftCase) -> Counted:
    from opdtool.jobs.token_counts import count_sources

    return count_sources(
        job.counts,
        vocab_size=case.targets,
        everything=job.everything,
        rename={name: theirs for name, theirs in job.rename.items() if name not in OF_MAPS},
        max_memory=job.max_memory,
        device=job.device,
    )


def coverage_of(case: DraftCase, counted: Counted) -> tuple[dict[str, Any], Bars]:
    """What share of counted tokens the draft vocabulary keeps, beside the best of its size."""
    from opdtool.core.vocab import choose_draft_vocab, coverage

    counts = counted.counts
    counted.require_any()
    inside = case.ids[(case.ids >= 0) & (case.ids < len(counts))]
    best = choose_draft_vocab(counts, min(case.entries, len(counts)))
    kept, most = coverage(counts, inside), coverage(counts, best)
    bars = Bars(
        title=f"coverage of {counted.total:,} counted tokens",
        labels=("this map", f"best {plural(len(best), 'id', ',')}"),
        values=(100 * kept, 100 * most),
        limit=100.0,
        unit="%",
    )
    stats = {"coverage": kept, "best_coverage": most, "counted_tokens": counted.total}
    return stats, bars
