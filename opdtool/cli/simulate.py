"""``opdtool simulate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opdtool.cli.options import (
    CpOption,
    DeviceOption,
    ExitZeroOption,
    Format,
    FormatOption,
    QuietOption,
    Ranks,
    RanksOption,
    RenameOption,
    ReportOption,
    TimeoutOption,
    TpOption,
    parse_renames,
)
from opdtool.core.errors import InputError
from opdtool.findings import Report

if TYPE_CHECKING:
    from opdtool.checks.ranks import Outputs
    from opdtool.checks.ranks_cases import Case
    from opdtool.checks.ranks_judge import Verdicts
    from opdtool.core.layout import PackGeometry
    from opdtool.io.batch import Batch
    from opdtool.ranks.launch import Ranks as World
    from opdtool.ranks.topology import Topology

HIDDEN, INDEX = "teacher_full_hidden_states", "opd_full_teacher_index"


def command(
    batch: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[BATCH...]", help="A padded batch; without one, generated ones."),
    ] = None,
    tp: TpOption = None,
    cp: CpOption = None,
    ranks: RanksOption = Ranks.SIMULATED,
    cases: Annotated[
        int | None,
        typer.Option(
            "--cases", min=1, help="How many cases: 8 generated ones, or all of the batch's rows."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of whatever is drawn.")] = 0,
    rename: RenameOption = [],  # noqa: B006
    timeout: TimeoutOption = 300.0,
    device: DeviceOption = "auto",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Prove that packed, sharded and split computations agree with plain ones."""
    from opdtool.cli.emit import Output, emit
    from opdtool.ranks.launch import open_ranks

    output = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    job = SimulateJob(batch=batch or (), cases=cases, seed=seed, rename=parse_renames(rename))
    with open_ranks(
        ranks.value, tp_size=tp or 1, cp_size=cp or 1, timeout=timeout, device=device
    ) as world:
        emit(run(job, world), output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateJob:
    """All that ``opdtool simulate`` was asked to do."""

    batch: Sequence[Path] = ()
    cases: int | None = None
    seed: int = 0
    rename: Mapping[str, str] = field(default_factory=dict)


def run(job: SimulateJob, world: World) -> Report:
    """Run the equivalence suite on all ranks and judge it; returns the report."""
    from opdtool.checks import ranks_cases, ranks_judge
    from opdtool.jobs.progress import progress

    geometries = ranks_cases.geometries(world.tp_size, world.cp_size)
    verdicts = ranks_judge.Verdicts()
    count = rows = tokens = 0
    cases = _cases(job, world.tp_size)
    with progress("simulating", job.cases or 0) as advance:
        while group := list(islice(cases, world.dp_size)):
            _judge_group(group, geometries, world, verdicts)
            count += len(group)
            rows += sum(case.rows for case in group)
            tokens += sum(sum(case.lengths) for case in group)
            advance(len(group))
    if not count:
        raise InputError("the batch has no rows with tokens; there is nothing to simulate")
    how = "processes" if world.driver is not None else "simulated"
    skipped = {
        ranks_judge.RANKS_AGREE: "all ranks were simulated; --ranks spawn compares processes too"
    }
    return Report(
        command="simulate",
        geometry={
            "tp": world.tp_size,
            "cp": world.cp_size,
            "dp": world.dp_size,
            "cases": count,
            "sequences": rows,
            "tokens": tokens,
            "ranks": how,
        },
        findings=tuple(verdicts.findings(skipped)),
        stats={
            "cases": count,
            "seed": job.seed,
            "geometries": [ranks_cases.describe(geometry) for geometry in geometries],
        },
        sections=tuple(verdicts.tables()),
        inputs=tuple(str(path) for path in job.batch),
    )


def _judge_group(
    group: Sequence[Case],
    geometries: Sequence[PackGeometry],
    world: World,
    verdicts: Verdicts,
) -> None:
    """Judge one case for each data-parallel replica."""
    from opdtool.checks import ranks_judge

    size = world.tp_size * world.cp_size
    made = world.run_collective(_work, group, geometries)
    for place, case in enumerate(group):
        outputs = [each for found in made[place * size : (place + 1) * size] for each in found]
        grid = [
            outputs[cp * world.tp_size : (cp + 1) * world.tp_size] for cp in range(world.cp_size)
        ]
        ranks_judge.judge(verdicts, case, geometries, grid)
        if world.driver is not None:
            simulated = world.simulated().run_collective(_work, [case], geometries)
            here = [each for found in simulated for each in found]
            ranks_judge.judge_agreement(verdicts, case, geometries[0], here, outputs)


def _work(
    topology: Topology, cases: Sequence[Case], geometries: Sequence[PackGeometry]
) -> list[Outputs]:
    """What this rank makes of its replica's case."""
    from opdtool.checks.ranks import rank_outputs

    return [rank_outputs(topology, case, geometries) for case in topology.share(cases)]


def _cases(job: SimulateJob, tp_size: int) -> Iterator[Case]:
    from opdtool.checks.ranks_cases import generated_cases

    if not job.batch:
        yield from generated_cases(job.cases or 8, tp_size, job.seed)
        return
    from opdtool.io.batch import open_batch

    with open_batch(job.batch, rename=job.rename) as batch:
        batch.require("input_ids")
        for number, rows in enumerate(_row_groups(batch)):
            if job.cases is not None and number >= job.cases:
                return
            yield _case_of(batch, rows, number, job.seed, tp_size)


def _row_groups(batch: Batch) -> Iterator[Sequence[int]]:
    """Rows with tokens, in groups of few enough slots for one case."""
    from opdtool.checks.ranks_cases import MAX_SLOTS

    kept = batch.lengths.nonzero()[0].tolist()
    step = max(1, MAX_SLOTS // max(batch.width, 1))
    return (kept[start : start + step] for start in range(0, len(kept), step))


def _case_of(batch: Batch, rows: Sequence[int], number: int, seed: int, tp_size: int) -> Case:
    import numpy as np
    import torch

    from opdtool.checks.ranks_cases import MAX_PAYLOAD, build_case

    index = np.array(rows, dtype=np.int64)
    ids = batch.read("input_ids", index)
    if ids.ndim != 2:
        shape = list(batch.info("input_ids").shape)
        raise InputError(f"{batch.paths[0]}: input_ids has shape {shape}; expected [B,S]")
    sample = batch.sample_mask()
    payload = max(1, min(len(rows), MAX_PAYLOAD // max(min(batch.width, MAX_PAYLOAD), 1)))
    first, columns = index[:payload], slice(0, min(batch.width, MAX_PAYLOAD))
    hidden = batch.read(HIDDEN, first, columns) if HIDDEN in batch else None
    if hidden is not None and not bool(torch.isfinite(hidden).all()):
        raise InputError(
            f"{batch.paths[0]}: {HIDDEN} has values that are not finite in rows {rows[0]} to "
            f"{rows[payload - 1]}; find them with opdtool inspect"
        )
    return build_case(
        f"rows {rows[0]}..{rows[-1]}",
        ids,
        batch.lengths[index].tolist(),
        batch.read("token_mask", index) if "token_mask" in batch else torch.ones(ids.shape),
        torch.ones(len(rows)) if sample is None else sample[torch.from_numpy(index)],
        tp_size=tp_size,
        random=np.random.default_rng([seed, number]),
        hidden=hidden,
        teacher=batch.read(INDEX, first).tolist() if INDEX in batch else None,
    )
