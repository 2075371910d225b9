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
from opdtool.core.words import plural
from opdtool.findings import Report

if TYPE_CHECKING:
    from opdtool.checks.ranks import Outputs
    from opdtool.checks.ranks_cases import Case
    from opdtool.checks.ranks_verdicts import Verdicts
    from opdtool.core.geometry import PackGeometry
    from opdtool.io.batch import Batch
    from opdtool.ranks.launch import Ranks as World
    from opdtool.ranks.topology import Topology

PER_SLOT = 768
"""Bytes that a slot takes on every rank: what it makes in each geometry, and the judging of it."""
COPIES = 12
"""How often a position of the payload is held on every rank."""
LEAST = 1 << 10
"""Tokens of a case, however little memory there is."""
MOST = 1 << 18
"""Tokens of one row: what is true of so many is true of more."""
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
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Prove that packed, sharded and split computations agree with plain ones."""
    from opdtool.cli.emit import Output, emit
    from opdtool.ranks.launch import open_ranks

    output = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    job = SimulateJob(
        batch=batch or (),
        cases=cases,
        seed=seed,
        rename=parse_renames(rename),
        max_memory=parse_size(max_memory),
    )
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
    max_memory: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of a batch one case takes: ``slots`` of all its rows, ``columns`` of one row,
    and ``positions`` of the payload, which are projected."""

    slots: int
    columns: int
    positions: int

    @classmethod
    def within(cls, max_memory: int, ranks: int, hidden_bytes: int) -> Sizes:
        """What fits into ``max_memory`` on so many ranks, or the least that proves something."""
        from opdtool.checks.ranks_cases import MAX_PAYLOAD, MAX_SLOTS

        columns = max(LEAST, min(MOST, max_memory // (PER_SLOT * ranks)))
        positions = max_memory // (COPIES * ranks * max(hidden_bytes, 64))
        return cls(
            slots=min(MAX_SLOTS, columns),
            columns=columns,
            positions=max(LEAST // 16, min(MAX_PAYLOAD, positions)),
        )


def run(job: SimulateJob, world: World) -> Report:
    """Run the equivalence suite on all ranks and judge it; returns the report."""
    from opdtool.checks import ranks_cases, ranks_judge
    from opdtool.checks.ranks_verdicts import Verdicts
    from opdtool.jobs.progress import progress

    geometries = ranks_cases.geometries(world.tp_size, world.cp_size)
    verdicts = Verdicts()
    count = rows = tokens = 0
    cut: list[int] = []
    cases = _cases(job, world, cut)
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
        notes=tuple(
            f"of rows longer than {plural(columns, 'token', ',')} the first {columns:,} were taken"
            for columns in cut
        ),
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


def _cases(job: SimulateJob, world: World, cut: list[int]) -> Iterator[Case]:
    """The cases; ``cut`` gets the columns that are taken where rows are longer."""
    from opdtool.checks.ranks_cases import generated_cases

    if not job.batch:
        yield from generated_cases(job.cases or 8, world.tp_size, job.seed)
        return
    from opdtool.io.batch import open_batch

    with open_batch(job.batch, rename=job.rename) as batch:
        batch.require("input_ids")
        hidden = batch.info(HIDDEN) if HIDDEN in batch else None
        per_position = hidden.nbytes // (batch.rows * batch.width) if hidden else 0
        sizes = Sizes.within(job.max_memory, world.tp_size * world.cp_size, per_position)
        if int(batch.lengths.max()) > sizes.columns:
            cut.append(sizes.columns)
        for number, rows in enumerate(_row_groups(batch, sizes)):
            if job.cases is not None and number >= job.cases:
                return
            yield _case_of(batch, rows, number, job.seed, world.tp_size, sizes)


def _row_groups(batch: Batch, sizes: Sizes) -> Iterator[Sequence[int]]:
    """Rows with tokens, in groups of few enough slots for one case."""
    kept = batch.lengths.nonzero()[0].tolist()
    step = max(1, sizes.slots // max(min(batch.width, sizes.columns), 1))
    return (kept[start : start + step] for start in range(0, len(kept), step))


def _case_of(
    batch: Batch, rows: Sequence[int], number: int, seed: int, tp_size: int, sizes: Sizes
) -> Case:
    import numpy as np
    import torch

    from opdtool.checks.ranks_cases import build_case

    index = np.array(rows, dtype=np.int64)
    shape = batch.info("input_ids").shape
    if len(shape) != 2:
        raise InputError(f"{batch.paths[0]}: input_ids has shape {list(shape)}; expected [B,S]")
    taken = slice(0, min(batch.width, sizes.columns))
    ids = batch.read("input_ids", index, taken)
    sample = batch.sample_mask()
    positions = sizes.positions
    payload = max(1, min(len(rows), positions // max(min(batch.width, positions), 1)))
    first, columns = index[:payload], slice(0, min(batch.width, positions))
    hidden = batch.read(HIDDEN, first, columns) if HIDDEN in batch else None
    if hidden is not None and not bool(torch.isfinite(hidden).all()):
        raise InputError(
            f"{batch.paths[0]}: {HIDDEN} has values that are not finite in rows {rows[0]} to "
            f"{rows[payload - 1]}; find them with opdtool inspect"
        )
    return build_case(
        f"rows {rows[0]}..{rows[-1]}",
        ids,
        np.minimum(batch.lengths[index], taken.stop).tolist(),
        batch.read("token_mask", index, taken) if "token_mask" in batch else torch.ones(ids.shape),
        torch.ones(len(rows)) if sample is None else sample[torch.from_numpy(index)],
        tp_size=tp_size,
        random=np.random.default_rng([seed, number]),
        hidden=hidden,
        teacher=batch.read(INDEX, first).tolist() if INDEX in batch else None,
        positions=positions,
    )
