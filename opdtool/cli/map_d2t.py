"""``opdtool map-d2t``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
    Ranks,
    RanksOption,
    RenameOption,
    ReportOption,
    TimeoutOption,
    TpOption,
    parse_renames,
    parse_size,
)
from opdtool.core.errors import InputError
from opdtool.core.limits import check_tolerances
from opdtool.core.words import plural
from opdtool.findings import Diagnosis, Finding, Report, Table

if TYPE_CHECKING:
    from torch import Tensor

    from opdtool.checks.vocab_logits import Tally
    from opdtool.io.tensors import TensorInfo, TensorSource
    from opdtool.jobs.map_d2t import MapPlan, Recorded
    from opdtool.ranks.launch import Ranks as OpenRanks


def command(
    logits: Annotated[
        Path,
        typer.Argument(
            metavar="LOGITS", help="A file with teacher_logits or teacher_full_logits [B,S,V]."
        ),
    ],
    d2t: Annotated[
        Path, typer.Option("--d2t", metavar="FILE", help="The map; a checkpoint will do.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write [B,S,D]."),
    ] = None,
    tp: TpOption = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference", metavar="FILE", help="Recorded draft logits (or whole ones) to compare."
        ),
    ] = None,
    rtol: Annotated[
        float, typer.Option("--rtol", help="Allow |error| up to this times |value|.")
    ] = 0.0,
    atol: Annotated[float, typer.Option("--atol", help="Allow |error| up to this.")] = 0.0,
    name: Annotated[
        str | None,
        typer.Option("--name", "--tensor", metavar="NAME", help="The logits' tensor in LOGITS."),
    ] = None,
    rename: RenameOption = [],  # noqa: B006
    force: ForceOption = False,
    ranks: RanksOption = Ranks.SIMULATED,
    timeout: TimeoutOption = 300.0,
    device: DeviceOption = "auto",
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Cut teacher logits down to the draft vocabulary: column i is teacher column i + d2t[i].

    With --tp the ranks hold shards and exchange only the columns that are wanted. Without -o
    nothing is written: a comparison with --reference alone.
    """
    from opdtool.cli.emit import Output, emit
    from opdtool.ranks.launch import open_ranks

    to = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    job = MapJob(
        logits=logits,
        d2t=d2t,
        output=output,
        tp=tp or 1,
        reference=reference,
        rtol=rtol,
        atol=atol,
        name=name,
        rename=parse_renames(rename),
        force=force,
        max_memory=parse_size(max_memory),
    )
    with open_ranks(ranks.value, tp_size=job.tp, timeout=timeout, device=device) as opened:
        emit(run(job, opened), to)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapJob:
    """All that ``opdtool map-d2t`` was asked to do."""

    logits: Path
    d2t: Path
    output: Path | None = None
    tp: int = 1
    reference: Path | None = None
    rtol: float = 0.0
    atol: float = 0.0
    name: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    max_memory: int = 1 << 30

    def __post_init__(self) -> None:
        if self.output is None and self.reference is None:
            raise InputError("give -o FILE to write the draft logits to, or --reference FILE")
        check_tolerances(rtol=self.rtol, atol=self.atol)


def run(job: MapJob, ranks: OpenRanks) -> Report:
    """Map, write, compare; returns the report."""
    from opdtool.checks.vocab_logits import Tally, draft_logits_finding, misreadings
    from opdtool.io.writer import check_output
    from opdtool.jobs.map_d2t import find_misreadings

    if job.output is not None:
        check_output(job.output, force=job.force)
    plan = make_plan(job)
    tally = Tally()
    for part in _map(job, plan, ranks):
        tally.merge(part)
    findings: list[Finding] = []
    diagnosis: list[Diagnosis] = []
    if plan.reference is not None:
        findings.append(draft_logits_finding(tally, job.rtol, job.atol))
        if tally.mismatches:
            diagnosis = misreadings(find_misreadings(plan))
    return _report(job, plan, findings, diagnosis)


def _map(job: MapJob, plan: MapPlan, ranks: OpenRanks) -> list[Tally]:
    """All ranks' work, and their columns joined in the output."""
    from opdtool.io.writer import TensorFileWriter, TensorSpec
    from opdtool.jobs.map_d2t import join_shards, map_rank
    from opdtool.jobs.progress import progress

    B, S, _ = plan.shape
    with ExitStack() as stack:
        writer = None
        if job.output is not None:
            spec = TensorSpec("teacher_logits", plan.dtype, (B, S, plan.D))
            writer = stack.enter_context(TensorFileWriter(job.output, [spec], force=job.force))
        if ranks.driver is None:
            advance = stack.enter_context(progress("mapping", B * S))
            return ranks.run_collective(map_rank, plan, writer, None, advance)
        if job.output is None or writer is None:
            return ranks.run_collective(map_rank, plan)
        scratch = stack.enter_context(_scratch(job.output))
        ranks.guard(scratch)
        tallies = ranks.run_collective(map_rank, plan, None, scratch)
        join_shards(scratch, plan, writer, ranks.tp_size, ranks.dp_size)
        return tallies


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A directory beside the output that every rank can reach, gone afterwards."""
    with tempfile.TemporaryDirectory(
        dir=output.absolute().parent, prefix=f".{output.name}.ranks."
    ) as folder:
        yield Path(folder)


def make_plan(job: MapJob) -> MapPlan:
    """Look at the files, hold sizes against each other, and cut the work into blocks.

    Raises:
        InputError: no logits or no map, sizes that do not divide, a target id outside the
            vocabulary, a reference of another shape, or memory for not even one position.
    """
    from opdtool.core.vocab import ids_from_d2t
    from opdtool.io.tensors import check_renames, open_tensors
    from opdtool.jobs.draft_maps import read_draft_map
    from opdtool.jobs.map_d2t import MOST_BYTES, MapPlan, cut_blocks, find_logits

    d2t = read_draft_map([job.d2t]).d2t
    with ExitStack() as stack:
        paths = [path for path in (job.logits, job.reference) if path is not None]
        source, *more = [
            stack.enter_context(open_tensors([path], rename=job.rename, strict_rename=False))
            for path in paths
        ]
        check_renames(job.rename, source, *more)
        logits = find_logits(source, job.logits, job.name)
        info, stored = source.info(logits), source.original_name(logits)
        recorded = [
            _recorded(one, path, info, len(d2t)) for one, path in zip(more, paths[1:], strict=True)
        ]
    B, S, V = info.shape
    for what, size in (("vocabulary", V), ("draft vocabulary", len(d2t))):
        if size % job.tp:
            raise InputError(
                f"{job.logits if what == 'vocabulary' else job.d2t}: the {what} of {size} does not "
                f"divide by --tp {job.tp}: {size % job.tp} left over"
            )
    try:
        ids_from_d2t(d2t, V)
    except InputError as error:
        raise InputError(f"{job.d2t}: {error}") from None
    # A position's shards and its draft columns: wanted, sent, received and joined; and of what
    # is compared both sides and their difference in float64.
    each = info.itemsize * (V + 4 * len(d2t))
    each += sum(one.position_bytes + 32 * len(d2t) for one in recorded)
    if each > job.max_memory:
        raise InputError(
            f"--max-memory {job.max_memory} is too little: one position takes "
            f"{plural(each, 'byte')}"
        )
    positions = max(1, min(job.max_memory, MOST_BYTES) // each)
    return MapPlan(
        logits=job.logits,
        name=stored,
        dtype=info.dtype,
        shape=(B, S, V),
        d2t=d2t,
        blocks=cut_blocks((B, S, V), positions),
        reference=recorded[0] if recorded else None,
        rtol=job.rtol,
        atol=job.atol,
    )


def _recorded(source: TensorSource, path: Path, info: TensorInfo, D: int) -> Recorded:
    """What the mapped logits are compared with."""
    from opdtool.jobs.map_d2t import Recorded, find_reference

    name = find_reference(source, path, D)
    found = source.info(name)
    B, S, V = info.shape
    if found.shape[:2] != (B, S) or found.shape[2] not in (D, V):
        raise InputError(
            f"{path}: {name} is {list(found.shape)}; [{B}, {S}, {D}] is expected, or "
            f"{plural(V, 'column')}"
        )
    return Recorded(
        path=path,
        name=source.original_name(name),
        whole=found.shape[2] != D,
        position_bytes=found.itemsize * found.shape[2],
    )


def _report(
    job: MapJob, plan: MapPlan, findings: list[Finding], diagnosis: list[Diagnosis]
) -> Report:
    B, S, V = plan.shape
    table, moved = traffic(plan.d2t, V, job.tp)
    stats: dict[str, Any] = {
        "positions": B * S,
        "vocab_size": V,
        "draft_vocab_size": plan.D,
        "columns_from_other_ranks": moved,
    }
    notes = [f"wrote teacher_logits [{B}, {S}, {plan.D}] to {job.output}"] if job.output else []
    return Report(
        command="map-d2t",
        geometry={"tp": job.tp, "vocab_size": V, "draft_vocab_size": plan.D},
        findings=tuple(findings),
        diagnosis=tuple(diagnosis),
        stats=stats,
        sections=(table,),
        notes=tuple(notes),
        inputs=(str(job.logits), str(job.d2t)),
    )


def traffic(d2t: Tensor, V: int, tp: int) -> tuple[Table, list[int]]:
    """How many columns each rank keeps and gets from others, as a table and as numbers."""
    import torch

    from opdtool.core.vocab import ids_from_d2t

    owner = torch.div(ids_from_d2t(d2t, V), V // tp, rounding_mode="floor").reshape(tp, -1)
    own = [int((owner[rank] == rank).sum()) for rank in range(tp)]
    share = len(d2t) // tp
    table = Table(
        title="draft columns of each rank",
        columns=("tp rank", "columns", "its own", "from other ranks"),
        rows=tuple(
            (str(rank), f"{share:,}", f"{kept:,}", f"{share - kept:,}")
            for rank, kept in enumerate(own)
        ),
        numeric=frozenset({"tp rank", "columns", "its own", "from other ranks"}),
    )
    return table, [share - kept for kept in own]
