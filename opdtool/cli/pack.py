"""``opdtool pack``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opdtool.cli.options import (
    Algorithm,
    CpOption,
    DeviceOption,
    ExitZeroOption,
    ForceOption,
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
from opdtool.core.words import plural
from opdtool.findings import Bars, Report, Scalar, Table
from opdtool.jobs.batch_errors import naming_batch
from opdtool.jobs.geometry import GeometryOptions, pack_geometry
from opdtool.jobs.progress import progress

if TYPE_CHECKING:
    from opdtool.core.geometry import PackGeometry
    from opdtool.core.plan import BinOptions, PackPlan, Utilisation
    from opdtool.io.packs import PackContents
    from opdtool.ranks.launch import Ranks as World
    from opdtool.ranks.topology import Topology

MOST_BARS = 64
"""More microbatches than this are drawn as a histogram."""


def command(
    batch: Annotated[
        list[Path], typer.Argument(metavar="BATCH...", help="The padded batch; one or more files.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where to write.")],
    cp: CpOption = None,
    tp: TpOption = None,
    sequence_parallel: SequenceParallelOption = None,
    pad_multiple: PadMultipleOption = None,
    fp8: Fp8Option = None,
    pad_packed_multiple: PadPackedMultipleOption = None,
    pad_packed_to: PadPackedToOption = None,
    tail: TailOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, help="Split into microbatches of at most this many slots."
        ),
    ] = None,
    algorithm: Annotated[
        Algorithm, typer.Option("--algorithm", help="How rows are put into microbatches.")
    ] = Algorithm.BFD,
    min_bins: Annotated[
        int, typer.Option("--min-bins", min=1, help="At least this many microbatches.")
    ] = 1,
    bins_multiple_of: Annotated[
        int, typer.Option("--bins-multiple-of", min=1, help="A multiple of this many microbatches.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the ffs shuffle.")] = 0,
    drop_empty: Annotated[
        bool, typer.Option("--drop-empty", help="Leave rows of length 0 out.")
    ] = False,
    rename: RenameOption = [],  # noqa: B006
    row_aligned: RowAlignedOption = [],  # noqa: B006
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
    """Pack padded batches into [1, T/CP] with cumulative lengths and CP windows."""
    from opdtool.cli.emit import Output, emit

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
    from opdtool.core.plan import BinOptions
    from opdtool.jobs.device import resolve_device
    from opdtool.ranks.launch import open_ranks

    resolve_device(device)  # packing moves bytes from file to file: no device is faster at it
    bins = BinOptions(
        max_tokens=max_tokens,
        algorithm=algorithm.value,
        min_bins=min_bins,
        bins_multiple_of=bins_multiple_of,
        seed=seed,
    )
    job = PackJob(
        batch=tuple(batch),
        output=output,
        geometry=options.resolve(),
        bins=bins,
        drop_empty=drop_empty,
        rename=parse_renames(rename),
        row_aligned=tuple(row_aligned),
        force=force,
        max_memory=parse_size(max_memory),
    )
    with open_ranks(
        ranks.value, tp_size=tp or 1, cp_size=cp or 1, timeout=timeout, device="cpu"
    ) as world:
        emit(run(job, world), told)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """All that ``opdtool pack`` was asked to do."""

    batch: Sequence[Path]
    output: Path
    geometry: Mapping[str, Scalar]
    bins: BinOptions
    drop_empty: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    row_aligned: Sequence[str] = ()
    force: bool = False
    max_memory: int = 1 << 30


def run(job: PackJob, world: World) -> Report:
    """Pack the batch into the output directory, on all ranks; returns the report."""
    from opdtool.core.plan import plan_packs, utilisation
    from opdtool.io.batch import open_batch
    from opdtool.io.hashing import InputHasher
    from opdtool.io.manifest import make_manifest
    from opdtool.io.outdir import OutputDir
    from opdtool.io.packs import PackContents, PackWriter
    from opdtool.io.writer import check_output

    check_output(job.output, force=job.force, directory=True, inputs=job.batch)
    geometry = pack_geometry(job.geometry)
    with open_batch(job.batch, rename=job.rename, row_aligned=job.row_aligned) as batch:
        contents = PackContents.of(batch)
        with naming_batch(batch):
            plan = plan_packs(batch.lengths, geometry, job.bins, drop_empty=job.drop_empty)
        hasher = InputHasher(batch.paths)
        with (
            OutputDir(job.output, force=job.force) as out,
            progress("pack, tokens", int(plan.lengths.sum())) as advance,
        ):
            if world.driver is None:
                writer = PackWriter(
                    batch=batch,
                    plan=plan,
                    contents=contents,
                    max_memory=job.max_memory,
                    advance=advance,
                )
                with one_thread():
                    for microbatch in range(plan.microbatches):
                        writer.write(out, microbatch, range(geometry.cp_size))
            else:
                for records in world.run_writing(out.work, pack_share, job, plan, out.work):
                    out.add_records(records)
            manifest = make_manifest(
                "pack",
                geometry=_recorded_geometry(job, geometry),
                files=out.files,
                inputs=hasher.result(),
                batch=(batch.rows, batch.width),
                # One pack is no choice of an algorithm.
                algorithm=job.bins.algorithm if job.bins.max_tokens else None,
                extra=_extra(contents, plan),
            )
            out.finish(manifest.to_json())
        return pack_report(plan, utilisation(plan), contents, job)


def pack_share(
    topology: Topology, job: PackJob, plan: PackPlan, work: Path
) -> list[dict[str, Any]]:
    """One rank's files, its replica's microbatches in its own window; returns their records.

    Tensor-parallel ranks would write the same files, so they share the microbatches out too.
    """
    from opdtool.io.batch import open_batch
    from opdtool.io.outdir import OutputPart
    from opdtool.io.packs import PackContents, PackWriter

    part = OutputPart(work, job.output)
    with (
        one_thread(),
        open_batch(job.batch, rename=job.rename, row_aligned=job.row_aligned) as batch,
    ):
        writer = PackWriter(
            batch=batch, plan=plan, contents=PackContents.of(batch), max_memory=job.max_memory
        )
        for microbatch in topology.share_with_tp(range(plan.microbatches)):
            writer.write(part, microbatch, topology.cp_ranks)
    return part.records()


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: moving bytes gains nothing from more, and hashing wants the rest."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _recorded_geometry(job: PackJob, geometry: PackGeometry) -> dict[str, Scalar]:
    return {
        **job.geometry,
        "sequence_multiple": geometry.sequence_multiple,
        "total_multiple": geometry.total_multiple,
        "max_tokens": job.bins.max_tokens,
    }


def _extra(contents: PackContents, plan: PackPlan) -> dict[str, object]:
    return {
        "token_aligned": list(contents.token_aligned),
        "row_aligned": list(contents.row_aligned),
        "dropped_rows": plan.dropped.tolist(),
        "microbatches": plan.microbatches,
        "min_bins": plan.bins.min_bins,
        "bins_multiple_of": plan.bins.bins_multiple_of,
        "seed": plan.bins.seed,
    }


def pack_report(
    plan: PackPlan, figures: Utilisation, contents: PackContents, job: PackJob
) -> Report:
    """What ``opdtool pack`` says: how full the packs are, and what was left out."""
    tail = "absorbed tail" if plan.geometry.tail == "absorb" else "tail segments"
    rows = (
        ("sequences", f"{len(plan.order):,}"),
        ("real tokens", f"{figures.real_tokens:,}"),
        ("alignment padding", f"{figures.alignment_padding:,}"),
        (tail, f"{figures.tail_padding:,}"),
        ("packed slots", f"{figures.slots:,}"),
        ("utilisation", f"{figures.utilisation:.1%}"),
        ("microbatches", f"{figures.microbatches:,}"),
        ("lower bound", f"{figures.lower_bound:,}"),
        ("balance (fullest / mean)", f"{figures.balance:.3f}"),
    )
    packs, cp = len(plan.offsets) - 1, plan.geometry.cp_size
    notes = [
        f"wrote {plural(packs * cp, 'file')} to {job.output}: {plural(packs, 'microbatch')} for "
        f"{plural(cp, 'context-parallel rank')}"
    ]
    if len(plan.dropped):
        notes.append(f"left out {plural(len(plan.dropped), 'row')} of length 0")
    if contents.left_out:
        notes.append(
            f"the batch's own {', '.join(contents.left_out)} not carried: packing computes them"
        )
    if not contents.has_mask:
        notes.append("the batch has no token_mask: no draft_token_mask was made")
    return Report(
        command="pack",
        geometry={
            "tp": plan.geometry.tp_size,
            "cp": plan.geometry.cp_size,
            "sequences": len(plan.order),
            "packed_tokens": figures.slots,
            "sequence_multiple": plan.geometry.sequence_multiple,
            "total_multiple": plan.geometry.total_multiple,
            "algorithm": plan.bins.algorithm if plan.bins.max_tokens else None,
        },
        stats={
            "real_tokens": figures.real_tokens,
            "alignment_padding": figures.alignment_padding,
            "tail_padding": figures.tail_padding,
            "packed_slots": figures.slots,
            "utilisation": figures.utilisation,
            "microbatches": figures.microbatches,
            "lower_bound": figures.lower_bound,
            "balance": figures.balance,
            "bins": [
                {"real_tokens": load, "slots": total}
                for load, total in zip(figures.loads, figures.totals, strict=True)
            ],
        },
        sections=(
            Table(
                title="pack", columns=("figure", "value"), rows=rows, numeric=frozenset({"value"})
            ),
            utilisation_bars(figures),
        ),
        notes=tuple(notes),
        inputs=tuple(str(path) for path in job.batch),
    )


def utilisation_bars(figures: Utilisation) -> Bars:
    """Utilisation of every microbatch; of more than :data:`MOST_BARS`, how many have which."""
    shares = [100 * load / total for load, total in zip(figures.loads, figures.totals, strict=True)]
    if len(shares) <= MOST_BARS:
        return Bars(
            title="utilisation of each microbatch",
            labels=tuple(f"{m:05d}" for m in range(len(shares))),
            values=tuple(shares),
            limit=100.0,
            unit="%",
        )
    counts = [0] * 20
    for share in shares:
        counts[min(int(share // 5), 19)] += 1
    return Bars(
        title=f"how many of the {plural(len(shares), 'microbatch', ',')} have which utilisation",
        labels=tuple(f"{5 * k}-{5 * k + 5} %" for k in range(20)),
        values=tuple(float(count) for count in counts),
        limit=float(max(counts)),
    )
