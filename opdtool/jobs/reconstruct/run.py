"""``opdtool reconstruct``, from plan to report: run the ranks, write their files, compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opdtool.checks import teacher as checks
from opdtool.findings import Finding, Report
from opdtool.io.background import workers
from opdtool.io.hashing import sha256_file, sha256_tensor
from opdtool.io.manifest import Manifest, ManifestInput, has_manifest, make_manifest, read_manifest
from opdtool.io.outdir import OutputDir, OutputPart
from opdtool.io.tensors import open_tensors
from opdtool.io.writer import TensorFileWriter, TensorSpec, check_output, dtype_code
from opdtool.jobs.device import resolve_device
from opdtool.jobs.progress import progress
from opdtool.jobs.reconstruct.diagnosis import diagnosed
from opdtool.jobs.reconstruct.engine import run_rank
from opdtool.jobs.reconstruct.files import Files
from opdtool.jobs.reconstruct.find import shard_sizes
from opdtool.jobs.reconstruct.inputs import make_plan
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.merge import merge_ranks
from opdtool.jobs.reconstruct.plan import Plan, TensorAt
from opdtool.jobs.reconstruct.report import make_report
from opdtool.jobs.reconstruct.results import RankResult
from opdtool.ranks.launch import Ranks, open_ranks
from opdtool.ranks.topology import Topology


def run(job: ReconstructJob) -> Report:
    """Rebuild every rank's teacher logits; write them, compare them, say what was found.

    Raises:
        InputError: whatever cannot be right about the inputs, or an output in the way.
    """
    resolve_device(job.device)  # refuses what is none, before any rank looks for it
    tp_size, cp_size = shard_sizes(job.tp, job.cp, [*job.reference], [*job.student])
    with open_ranks(
        job.ranks, tp_size=tp_size, cp_size=cp_size, timeout=job.timeout, device=job.device
    ) as ranks:
        if job.output is not None:
            check_output(job.output, force=job.force, directory=True, inputs=_inputs(job))
        plan = make_plan(job)
        manifest = _manifest(job)
        with _hashed(job, plan, manifest) as hashes:
            results = _rebuild(ranks, job, plan, hashes)
            identity = _identity(manifest, hashes)
        parts = merge_ranks(results)
        found = diagnosed(ranks, plan, parts)
        return found.said(make_report(job, plan, parts, identity, found.diagnosis))


def _inputs(job: ReconstructJob) -> list[Path]:
    """Everything that is read, which no output may replace."""
    specs = [*job.heads, *job.norms.values()]
    single = [job.payload, *(p for p in (job.d2t, job.logprobs) if p is not None)]
    return [*single, *(spec.path for spec in specs), *job.reference, *job.student, *job.batch]


def _rebuild(
    ranks: Ranks, job: ReconstructJob, plan: Plan, hashes: _Hashes | None
) -> list[RankResult]:
    if job.output is None or hashes is None:
        nested = ranks.run_together(rebuild_ranks, plan, None)
        return [result for results in nested for result in results]
    with OutputDir(job.output, force=job.force) as out:
        nested = ranks.run_writing(out.work, rebuild_ranks, plan, str(out.work), str(job.output))
        results = [result for results in nested for result in results]
        if ranks.dp_size == 1:
            for result in results:
                out.add_records(result.written)
        else:
            for records in ranks.run(seal_shards, plan, str(out.work), _bytes_by_shard(results)):
                out.add_records(records)
        manifest = make_manifest(
            "reconstruct",
            geometry=_geometry(plan),
            files=out.files,
            inputs=hashes.inputs(),
            batch=(plan.layout.num_segments, plan.grid.width),
            extra=_extra(plan),
        )
        out.finish(manifest.to_json())
    return results


def rebuild_ranks(
    topology: Topology, plan: Plan, work: str | None, shown: str | None = None
) -> list[RankResult]:
    """The results of all ranks that this call stands for; writes their files into ``work``, for
    what will be ``shown``. Replicas fill one file together."""
    share = (topology.dp_rank, topology.dp_size)
    places = [(t, c) for c in topology.cp_ranks for t in topology.tp_ranks]
    total = plan.layout.local_total * plan.columns // plan.tp_size * len(places)
    total //= topology.dp_size
    results = []
    with Files(plan) as files, progress("reconstruct", total) as advance:
        for tp_rank, cp_rank in places:
            ranks = (files, plan, tp_rank, cp_rank, topology.device)
            if work is None:
                result = run_rank(*ranks, share=share, advance=advance)
            else:
                part = OutputPart(Path(work), Path(shown or work))
                spec, shared = _shard_spec(plan), topology.dp_size > 1
                name = plan.shard_name(tp_rank, cp_rank)
                with part.tensor_file(name, [spec], shared=shared) as file:
                    write = partial(_write, file, spec.shape[1])
                    result = run_rank(*ranks, write=write, share=share, advance=advance)
                result.written, result.bytes_written = part.records(), file.written
            results.append(result.to_cpu())
    return results


def seal_shards(
    topology: Topology, plan: Plan, work: str, written: Mapping[tuple[int, int], int]
) -> list[dict[str, Any]]:
    """Hash the files that the replicas filled together, shared out over all ranks."""
    part = OutputPart(Path(work))
    for place in topology.share_with_all(sorted(written)):
        part.seal(plan.shard_name(*place), [_shard_spec(plan)], written[place])
    return part.records()


def _bytes_by_shard(results: Sequence[RankResult]) -> dict[tuple[int, int], int]:
    """How much all replicas together wrote of each (tensor-, context-parallel) rank's file."""
    written: dict[tuple[int, int], int] = {}
    for result in results:
        place = (result.tp_rank, result.cp_rank)
        written[place] = written.get(place, 0) + result.bytes_written
    return written


def _shard_spec(plan: Plan) -> TensorSpec:
    shape = (plan.rows, plan.layout.local_total // plan.rows, _local_columns(plan))
    return TensorSpec("teacher_logits", dtype_code(plan.compute), shape)


def _write(
    file: TensorFileWriter, width: int, slot: int, column: int, logits: torch.Tensor
) -> None:
    """Put logits [P, v] where slot and column say, in a tensor of rows of ``width`` slots."""
    for row, start, piece in _rows(slot, logits, width):
        file.write("teacher_logits", piece[None], row, start, column)


def _rows(slot: int, logits: torch.Tensor, width: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(row, first position, logits) of a stretch of slots, row by row."""
    done = 0
    while done < len(logits):
        row, start = divmod(slot + done, width)
        count = min(width - start, len(logits) - done)
        yield row, start, logits[done : done + count]
        done += count


def _local_columns(plan: Plan) -> int:
    return plan.columns // plan.tp_size


def _geometry(plan: Plan) -> dict[str, str | int | float | bool | None]:
    return {
        "tp": plan.tp_size,
        "cp": plan.cp_size,
        "packed": plan.packed,
        "sequence": plan.layout.total // plan.rows,
        "vocabulary": plan.vocabulary,
        "columns": plan.columns,
    }


def _extra(plan: Plan) -> dict[str, object]:
    return {
        "payload": plan.kind,
        "dtype": dtype_code(plan.compute),
        "logit_scale": plan.scale,
        "logit_softcap": plan.softcap,
        "normed": sorted(i for i, head in plan.heads.items() if head.norm is not None),
        "draft_columns": None if plan.draft is None else len(plan.draft),
    }


class _Hashes:
    """Hashes of heads and other inputs, computed in threads beside the work."""

    def __init__(self, plan: Plan) -> None:
        self._jobs: list[tuple[str, str, int | None, str | None, Future[str]]] = []
        self.heads: dict[int, Future[str]] = {}
        for index, head in sorted(plan.heads.items()):
            self.heads[index] = self._tensor(head.weight, "head", index)

    def add_rest(self, plan: Plan, payload: Path, d2t: Path | None) -> None:
        """The inputs of an output: norms, payload, map."""
        for index, head in sorted(plan.heads.items()):
            if head.norm is not None:
                self._tensor(head.norm.weight, "norm", index)
        for path, role in ((payload, "payload"), (d2t, "d2t")):
            if path is not None:
                # A directory of them is its files: each is bound by itself.
                files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
                for file in files:
                    future = workers().submit(sha256_file, file)
                    self._jobs.append((file.name, role, None, None, future))

    def cancel(self) -> None:
        """Hash nothing more: what has not begun is not wanted."""
        for *_, future in self._jobs:
            future.cancel()

    def inputs(self) -> list[ManifestInput]:
        """Everything hashed, as the manifest lists it."""
        return [
            ManifestInput(name, future.result(), role, index, tensor)
            for name, role, index, tensor, future in self._jobs
        ]

    def _tensor(self, at: TensorAt, role: str, index: int) -> Future[str]:
        future = workers().submit(_tensor_hash, at)
        self._jobs.append((at.path.name, role, index, at.name, future))
        return future


@contextmanager
def _hashed(job: ReconstructJob, plan: Plan, manifest: Manifest | None) -> Iterator[_Hashes | None]:
    if job.output is None and manifest is None:
        yield None
        return
    hashes = _Hashes(plan)
    try:
        if job.output is not None:
            hashes.add_rest(plan, job.payload, job.d2t)
        yield hashes
    finally:
        hashes.cancel()


def _tensor_hash(at: TensorAt) -> str:
    with open_tensors([at.path]) as source:
        return sha256_tensor(source, at.name)


def _manifest(job: ReconstructJob) -> Manifest | None:
    """The manifest of a reference that this command wrote."""
    for path in job.reference:
        directory = path if path.is_dir() else path.parent
        if not has_manifest(directory):
            continue
        manifest = read_manifest(directory)
        listed = path.is_dir() or path.name in {file.name for file in manifest.files}
        if manifest.kind == "reconstruct" and listed:
            return manifest
    return None


def _identity(manifest: Manifest | None, hashes: _Hashes | None) -> Finding | None:
    """Whether the heads are those that the reference's manifest binds, where it has one."""
    if manifest is None or hashes is None or not hashes.heads:
        return None
    bound = {i.index: i.sha256 for i in manifest.inputs if i.role == "head" and i.index is not None}
    changed = []
    for index, future in sorted(hashes.heads.items()):
        own = future.result()
        if bound.get(index) == own:
            continue
        others = [str(i) for i, sha256 in bound.items() if sha256 == own]
        was = f"; it is the one of teacher {others[0]} there" if others else ""
        changed.append(
            f"the head of teacher {index} is not the one that the reference was made with{was}"
        )
    return checks.head_identity(changed, len(hashes.heads))
