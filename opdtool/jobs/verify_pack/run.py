"""What ``opdtool verify-pack`` does: read each pack, check its layout and tensors, diagnose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opdtool.checks.content_verdict import (
    content_findings,
    covered,
    diagnose_packs,
)
from opdtool.checks.masks_findings import MaskFindings
from opdtool.checks.masks_verdict import merge_findings
from opdtool.checks.room import DEFAULT, Room
from opdtool.checks.strips import strip_of
from opdtool.core.errors import InputError
from opdtool.findings import Report, Section
from opdtool.io.batch import Batch, open_batch
from opdtool.io.tensors import check_renames
from opdtool.jobs.dump_files import DumpFiles, DumpPack, group_dump
from opdtool.jobs.geometry import GeometryOptions, pack_geometry
from opdtool.jobs.ranked import interleaved, pack_up, unpack_with
from opdtool.jobs.verify_mask import batch_ids, mask_weights
from opdtool.jobs.verify_pack.found import PackRun
from opdtool.jobs.verify_pack.pack import MASK, check_pack

if TYPE_CHECKING:
    from opdtool.ranks.launch import Ranks
    from opdtool.ranks.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPackJob:
    """All that ``opdtool verify-pack`` was asked to do."""

    dump: Sequence[Path]
    batch: Sequence[Path]
    geometry: GeometryOptions = field(default_factory=GeometryOptions)
    rename: Mapping[str, str] = field(default_factory=dict)
    row_aligned: Sequence[str] = ()
    device: str = "auto"
    max_memory: int = DEFAULT


@contextmanager
def _opened(job: VerifyPackJob) -> Iterator[tuple[PackRun, tuple[DumpPack, ...]]]:
    """What every rank opens to check a dump, with nothing found yet, and the dump's packs."""
    groups = group_dump(job.dump, job.geometry.cp)
    resolved = replace(job.geometry, cp=groups.cp).resolve(groups.recorded)
    files, room = DumpFiles(job.rename), Room.within(job.max_memory)
    with _open_batch(job, groups.row_aligned) as batch, closing(files):
        run = PackRun(
            files=files,
            batch=batch,
            geometry=pack_geometry(resolved),
            room=room,
            weights=mask_weights(batch, room) if "token_mask" in batch.token_aligned else None,
        )
        yield run, groups.packs


def _open_batch(job: VerifyPackJob, recorded: Sequence[str]) -> Batch:
    """The batch; a tensor that could go by tokens goes by rows where a manifest says so."""

    def opened(row_aligned: Sequence[str]) -> Batch:
        return open_batch(
            job.batch, rename=job.rename, row_aligned=row_aligned, strict_rename=False
        )

    batch = opened(job.row_aligned)
    by_rows = sorted(set(recorded) & set(batch.token_aligned))
    if not by_rows:
        return batch
    batch.close()
    return opened([*job.row_aligned, *by_rows])


def _check_share(topology: Topology, job: VerifyPackJob) -> bytes:
    """What one rank found on its share of the packs, pack by pack."""
    with _opened(job) as (run, packs):
        found = []
        for pack in topology.share_with_all(packs):
            found.append(replace(run, outcomes=[], tensors={}, masks=[], loose={}, unknown=set()))
            check_pack(found[-1], pack)
        for cells in run.cells.values():
            cells.forget()
        return pack_up(found, run.shared)


def verify_pack(job: VerifyPackJob, world: Ranks) -> Report:
    """The report on a pack, its microbatches checked on all ranks.

    Raises:
        InputError: files, names or shapes that are not what the command needs.
    """
    with _opened(job) as (run, packs):
        if world.driver is None:
            for pack in packs:
                check_pack(run, pack)
        else:
            for path in (path for pack in packs for path in pack.files):
                run.files.source(path)  # so that renames are known to be used here too
            shares = world.run(_check_share, job)
            for found in interleaved([unpack_with(share, run.shared) for share in shares]):
                run.absorb(found)
        check_renames(job.rename, run.batch, run.files)
        if not any(_slots_of(run, name) for name, _ in run.outcomes) and not any(
            finding.status == "fail" for _, outcome in run.outcomes for finding in outcome.findings
        ):
            raise InputError(f"{job.dump[0]}: no pack has a slot; nothing was checked")
        return _report(job, run)


def _report(job: VerifyPackJob, run: PackRun) -> Report:
    findings = merge_findings(
        [(name, [*outcome.findings, *run.loose.get(name, [])]) for name, outcome in run.outcomes]
    )
    for packs in run.tensors.values():
        findings += content_findings(packs)
    if run.masks:
        values = MaskFindings(packs=run.masks, tensor=MASK)
        findings += values.all()
    findings.append(covered(run.outcomes, run.batch.lengths.tolist()))
    findings.sort(key=lambda finding: finding.code)
    slots = sum(_slots_of(run, name) for name, _ in run.outcomes)
    notes = [f"not in the batch, so not checked: {', '.join(sorted(run.unknown))}"]
    return Report(
        command="verify-pack",
        geometry={
            "tp": run.geometry.tp_size,
            "cp": run.geometry.cp_size,
            "sequences": sum(len(outcome.rows) for _, outcome in run.outcomes),
            "packed_tokens": slots,
        },
        findings=tuple(findings),
        diagnosis=diagnose_packs([outcome for _, outcome in run.outcomes], run.tensors, run.masks),
        stats={"packs": len(run.outcomes), "rows": run.batch.rows},
        sections=_sections(run),
        notes=tuple(notes if run.unknown else ()),
        inputs=tuple(str(path) for path in job.dump),
    )


def _sections(run: PackRun) -> tuple[Section, ...]:
    """The first wrong sequence of the first tensor that is wrong and that one can show."""
    ids = batch_ids(run.batch)
    cases = [
        (pack.tensor, pack.name, pack.case, [*pack.scan.values.first, *pack.scan.fill.first])
        for packs in run.tensors.values()
        for pack in packs
        if pack.case.kind != "strict"
    ]
    masks = [(MASK, pack.name, pack.case, pack.scan.values.first) for pack in run.masks]
    for tensor, name, case, places in (*cases, *masks):
        if places:
            shown = name if len(run.outcomes) > 1 else ""
            strip = strip_of(case, ids, places[0][0], pack=shown, tensor=tensor)
            return (strip,) if strip is not None else ()
    return ()


def _slots_of(run: PackRun, name: str) -> int:
    for packs in run.tensors.values():
        for pack in packs:
            if pack.name == name:
                return pack.case.slots.total
    return next((pack.case.slots.total for pack in run.masks if pack.name == name), 0)
