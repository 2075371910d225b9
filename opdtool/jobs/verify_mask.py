"""What ``opdtool verify-mask`` does: read each pack, check its layout and mask, diagnose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.hypotheses import MaskWeights
from opdtool.checks.masks_findings import MaskFindings, MaskPack
from opdtool.checks.masks_sample import thinned
from opdtool.checks.masks_verdict import (
    Checked,
    DumpedMask,
    check_pack,
    diagnose_all,
    merge_findings,
)
from opdtool.checks.recipes_values import Cells, as_numbers
from opdtool.checks.registry import check_name
from opdtool.checks.room import DEFAULT, ROOM, Room
from opdtool.checks.strips import Ids, strip_of
from opdtool.core.errors import InputError
from opdtool.core.geometry import PackGeometry
from opdtool.core.limits import check_tolerances
from opdtool.core.offsets import Ints
from opdtool.core.words import plural
from opdtool.findings import Finding, Report, Section
from opdtool.io.batch import Batch, open_batch
from opdtool.io.tensors import TensorInfo, check_renames
from opdtool.jobs.batch_errors import naming_batch
from opdtool.jobs.dump_files import DumpFiles, DumpPack, group_dump
from opdtool.jobs.geometry import GeometryOptions, pack_geometry
from opdtool.jobs.ranked import interleaved, pack_up, unpack_with

if TYPE_CHECKING:
    from opdtool.ranks.launch import Ranks
    from opdtool.ranks.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyMaskJob:
    """All that ``opdtool verify-mask`` was asked to do. ``shift`` 0 is the unshifted
    convention."""

    dump: Sequence[Path]
    batch: Sequence[Path]
    mask_name: str = "draft_token_mask"
    shift: int = 1
    atol: float = 0.0
    geometry: GeometryOptions = field(default_factory=GeometryOptions)
    rename: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    max_memory: int = DEFAULT

    def __post_init__(self) -> None:
        check_tolerances(atol=self.atol)


VECTORS = ("cu_seqlens", "cu_seqlens_padded", "sequence_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What every rank opens to check a dump."""

    job: VerifyMaskJob
    packs: tuple[DumpPack, ...]
    geometry: PackGeometry
    files: DumpFiles
    batch: Batch
    weights: MaskWeights

    def check(self, packs: Sequence[DumpPack]) -> list[Checked]:
        """Check some packs."""
        checked, failing = [], 0
        for pack in packs:
            dumped = _dumped(self.job, pack, self.files, self.batch, self.geometry)
            with naming_batch(self.batch):
                entry = check_pack(dumped, self.batch, self.weights, self.geometry)
            if entry.pack is not None and (sample := entry.pack.case.sample) is not None:
                failing += 1
                entry.pack.case.sample = thinned(sample, failing)
            checked.append(entry)
        return checked

    @property
    def shared(self) -> dict[str, object]:
        """What verdicts refer to and each process has for itself."""
        return {"files": self.files, "batch": self.batch, "weights": self.weights}


@contextmanager
def _opened(job: VerifyMaskJob) -> Iterator[_Opened]:
    groups = group_dump(job.dump, job.geometry.cp)
    options = replace(job.geometry, cp=groups.cp)
    resolved = options.resolve(groups.recorded)
    geometry = pack_geometry(resolved)
    files = DumpFiles(job.rename)
    with (
        open_batch(job.batch, rename=job.rename, strict_rename=False) as batch,
        closing(files),
    ):
        if job.shift > max(batch.width, 1):
            raise InputError(
                f"--shift {job.shift} is past the row width {batch.width}: no slot could speak of "
                "such a token; give the depth of the draft"
            )
        yield _Opened(
            job=job,
            packs=groups.packs,
            geometry=geometry,
            files=files,
            batch=batch,
            weights=mask_weights(batch, Room.within(job.max_memory)),
        )


def _check_share(topology: Topology, job: VerifyMaskJob) -> bytes:
    """One rank's verdicts on its share of the packs."""
    with _opened(job) as opened:
        checked = opened.check(topology.share_with_all(opened.packs))
        return pack_up(checked, opened.shared)


def _check_all(opened: _Opened, world: Ranks) -> list[Checked]:
    if world.driver is None:
        return opened.check(opened.packs)
    for pack in opened.packs:
        for path in pack.files:
            opened.files.source(path)  # so that renames are known to be used here too
    shares = world.run(_check_share, opened.job)
    return interleaved([unpack_with(share, opened.shared) for share in shares])


def verify_mask(job: VerifyMaskJob, world: Ranks) -> Report:
    """The report on a dumped mask, its packs checked on all ranks.

    Raises:
        InputError: files, names or shapes that are not what the command needs.
    """
    with _opened(job) as opened:
        batch, files, packs_found = opened.batch, opened.files, opened.packs
        geometry = opened.geometry
        checked = _check_all(opened, world)
        check_renames(job.rename, batch, files)
        _refuse_nothing(job, checked)
        several = len(checked) > 1
        findings = merge_findings([(entry.name, entry.outcome.findings) for entry in checked])
        packs = [entry.pack for entry in checked if entry.pack is not None]
        ids = batch_ids(batch)
        dtype = _dtype_finding(job, packs_found, files)
        values = MaskFindings(packs=packs, tensor=job.mask_name, ids=ids)
        findings += [*_shape_finding(job, checked), dtype, *values.all()]
        findings.sort(key=lambda finding: finding.code)
        diagnosis = diagnose_all(checked, job.shift)
        return Report(
            command="verify-mask",
            geometry=geometry_of(checked, geometry),
            findings=tuple(findings),
            diagnosis=diagnosis,
            stats=_stats(checked, batch),
            sections=_sections(packs, ids, several),
            inputs=tuple(str(path) for path in job.dump),
        )


def _refuse_nothing(job: VerifyMaskJob, checked: Sequence[Checked]) -> None:
    """Refuse a dump of no slots for a batch of no tokens: there is nothing to check."""
    slots = sum(sum(entry.pack.case.slots.sizes) for entry in checked if entry.pack)
    tokens = sum(int(entry.outcome.lengths.sum()) for entry in checked)
    if slots == tokens == 0 and all(entry.pack is not None for entry in checked):
        raise InputError(
            f"{job.dump[0]}: {job.mask_name} has no slots and the batch no tokens; "
            "nothing was checked"
        )


def mask_weights(batch: Batch, room: Room = ROOM) -> MaskWeights:
    """The batch's masks.

    Raises:
        InputError: there is no ``token_mask`` [B,S], or ``sample_mask`` is not [B] or not
            finite.
    """
    info = batch.require("token_mask")
    if info.shape != (batch.rows, batch.width):
        batch.token_mask(slice(0, 0))  # says what is wrong with it
    sample = batch.sample_mask()
    dtype = info.torch_dtype
    if sample is not None:
        dtype = torch.promote_types(dtype, sample.dtype)
    plain = not dtype.is_floating_point or dtype == torch.float64
    return MaskWeights(
        tokens=Cells(
            batch=batch, name="token_mask", width=batch.width, decode=as_numbers, room=room
        ),
        sample=np.ones(batch.rows)
        if sample is None
        else np.asarray(sample.to(torch.float64).numpy()),
        given=sample,
        rounding=None if plain else dtype,
    )


def _dumped(
    job: VerifyMaskJob, pack: DumpPack, files: DumpFiles, batch: Batch, geometry: PackGeometry
) -> DumpedMask:
    sizes = [_slots(files.source(path).require(job.mask_name), path) for path in pack.files]
    vectors, disagree = read_vectors(pack, files)
    return DumpedMask(
        name=pack.name,
        tensor=job.mask_name,
        pieces=[mask_reader(files, path, job.mask_name) for path in pack.files],
        sizes=sizes,
        vectors=vectors,
        whole=is_whole(pack, sizes, vectors, batch, geometry),
        shift=job.shift,
        atol=job.atol,
        known=disagree,
    )


def _slots(info: TensorInfo, path: Path) -> int:
    """The slots of a mask of shape [1,T], [T] or [T,1]."""
    shape = info.shape
    if len(shape) == 1 or (len(shape) == 2 and 1 in shape):
        return info.numel
    raise InputError(
        f"{path}: {info.name} has shape {list(shape)}; expected [1,T], [T] or [T,1]. "
        "A mask of the padded batch must be packed first: opdtool build-mask"
    )


def mask_reader(files: DumpFiles, path: Path, name: str) -> Callable[[int, int], Tensor]:
    """Reads slots [start, stop) of one file's mask as [n]."""
    return partial(_read_slots, files, path, name)


def _read_slots(files: DumpFiles, path: Path, name: str, start: int, stop: int) -> Tensor:
    return files.source(path).read_flat(name, start, stop)


def read_vectors(
    pack: DumpPack, files: DumpFiles
) -> tuple[dict[str, Tensor | None], list[Finding]]:
    """The first rank's cumulative lengths and index, and whether the other ranks agree."""
    vectors = {name: files.maybe(pack.files[0], name) for name in VECTORS}
    if len(pack.files) == 1:
        return vectors, []
    for rank, path in enumerate(pack.files[1:], start=1):
        for name in VECTORS:
            mine, other = vectors[name], files.maybe(path, name)
            same = (mine is None) == (other is None) and (
                mine is None or other is None or torch.equal(mine.reshape(-1), other.reshape(-1))
            )
            if not same:
                return vectors, [
                    Finding(
                        code="OPD110",
                        name=check_name("OPD110"),
                        status="fail",
                        message=f"rank {rank} ({path.name}) has another {name} than rank 0",
                        tensor=name,
                    )
                ]
    if all(vector is None for vector in vectors.values()):
        return vectors, []
    agreed = Finding(
        code="OPD110",
        name=check_name("OPD110"),
        status="pass",
        message=f"the same on {plural(len(pack.files), 'rank')}",
    )
    return vectors, [agreed]


def is_whole(
    pack: DumpPack,
    sizes: Sequence[int],
    vectors: dict[str, Tensor | None],
    batch: Batch,
    geometry: PackGeometry,
) -> bool:
    """Whether a pack's one file without a rank in its name holds the whole pack.

    Raises:
        InputError: it holds one rank's piece, so that files are missing.
    """
    cp = geometry.cp_size
    if pack.tagged or len(sizes) > 1 or cp == 1:
        return False
    ends = set()
    for name in ("cu_seqlens_padded", "cu_seqlens"):
        vector = vectors[name]
        if vector is not None and vector.numel() and not vector.is_floating_point():
            ends.add(int(vector.reshape(-1)[-1]))
    if not ends:
        padded = geometry.padded(batch.lengths[_rows_named(vectors["sequence_index"], batch.rows)])
        ends.add(geometry.padded_total(int(padded.sum())))
    if sizes[0] not in ends and sizes[0] * cp in ends:
        raise InputError(
            f"{pack.files[0]}: {plural(sizes[0], 'slot')}, one rank's share of {sizes[0] * cp}; "
            "with --cp "
            f"{cp} give {plural(cp, 'file')}, with .cp0of{cp} to .cp{cp - 1}of{cp} in their names"
        )
    return True


def _rows_named(index: Tensor | None, B: int) -> Ints:
    """The rows that an index names; all of them where there is none, or one that the layout's
    checks will refuse."""
    if index is not None and not index.is_floating_point():
        rows = np.asarray(index.reshape(-1).to(torch.int64))
        if ((rows >= 0) & (rows < B)).all():
            return rows
    return np.arange(B, dtype=np.int64)


def _shape_finding(job: VerifyMaskJob, checked: Sequence[Checked]) -> list[Finding]:
    """Whether the masks have the slots of their layouts (uneven ranks were reported)."""
    if any(entry.pack is None for entry in checked):
        return []
    wrong = [entry for entry in checked if entry.pack and entry.pack.case.layout is None]
    slots = sum(entry.pack.case.slots.total for entry in checked if entry.pack)
    message = f"{plural(slots, 'slot')}"
    if wrong:
        total = wrong[0].pack.case.slots.total if wrong[0].pack else 0
        message = (
            f"{plural(total, 'slot')}, which no layout of the batch has; see the layout checks"
        )
    return [
        Finding(
            code="OPD302",
            name=check_name("OPD302"),
            status="fail" if wrong else "pass",
            message=message,
            tensor=job.mask_name,
        )
    ]


def _dtype_finding(job: VerifyMaskJob, packs: Sequence[DumpPack], files: DumpFiles) -> Finding:
    found = {
        files.source(path).require(job.mask_name).dtype for pack in packs for path in pack.files
    }
    same = len(found) == 1
    return Finding(
        code="OPD303",
        name=check_name("OPD303"),
        status="pass" if same else "fail",
        message=", ".join(sorted(found)) + ("" if same else ": not the same in all files"),
        tensor=job.mask_name,
    )


def geometry_of(checked: Sequence[Checked], geometry: PackGeometry) -> dict[str, int]:
    """The report's geometry."""
    slots = sum(entry.pack.case.slots.total for entry in checked if entry.pack)
    return {
        "tp": geometry.tp_size,
        "cp": geometry.cp_size,
        "sequences": sum(len(entry.outcome.rows) for entry in checked),
        "packed_tokens": slots,
    }


def _stats(checked: Sequence[Checked], batch: Batch) -> dict[str, int]:
    return {
        "packs": len(checked),
        "rows": batch.rows,
        "real_tokens": int(sum(int(entry.outcome.lengths.sum()) for entry in checked)),
    }


def batch_ids(batch: Batch) -> Ids | None:
    """Token ids of the batch by row and columns, where it has them."""
    if "input_ids" not in batch.token_aligned:
        return None

    def ids(row: int, start: int, stop: int) -> list[int]:
        found = batch.read("input_ids", slice(row, row + 1), slice(start, stop))
        return [int(i) for i in found[0].reshape(-1)[: stop - start]]

    return ids


def _sections(packs: Sequence[MaskPack], ids: Ids | None, several: bool) -> tuple[Section, ...]:
    for pack in packs:
        if pack.scan.values.first:
            slot = pack.scan.values.first[0][0]
            strip = strip_of(pack.case, ids, slot, pack=pack.name if several else "")
            return (strip,) if strip is not None else ()
    return ()
