"""The reference and the student of a plan: found, fitted to it, and how precise they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from opdtool.core.bounds import precision_behind, stored_precision
from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.jobs.reconstruct.bounds import plan_bound
from opdtool.jobs.reconstruct.find import find_sharded
from opdtool.jobs.reconstruct.job import LOGITS, ReconstructJob
from opdtool.jobs.reconstruct.plan import Plan, Sharded, TensorAt

SAMPLE_COLUMNS = 4096
HEAD_SAMPLE = 8
"""Rows of a head that tell what it holds."""


def recorded(job: ReconstructJob, what: str, used: set[str]) -> Sharded | None:
    paths = job.reference if what == "reference" else job.student
    if not paths:
        return None
    names = (LOGITS, "teacher_logits") if what == "reference" else ("student_logits",)
    return find_sharded(paths, f"--{what}", names, job.rename, used)


def with_logits(
    plan: Plan, job: ReconstructJob, reference: Sharded | None, student: Sharded | None
) -> Plan:
    """The plan with its reference and student, once their shapes are known to fit."""
    for side in (reference, student):
        if side is not None:
            _check_positions(plan, side)
    if reference is not None:
        if plan.draft is not None and reference.width != plan.real:
            reference = replace(reference, gathered=True)
            _check_gathered(plan, reference)
        plan = replace(plan, reference=reference)
        precision = _precision(plan, reference)
        plan = replace(
            plan, precision=precision, bound=plan_bound(plan, precision, job.rtol, job.atol)
        )
    if student is not None:
        if plan.draft is not None and student.width != plan.real:
            student = replace(student, gathered=True)
            _check_gathered(plan, student)
        elif student.width not in (plan.real, plan.columns):
            raise InputError(
                f"--student has {plural(student.width, 'column')}, but {plan.real} are rebuilt; "
                "divergences need the same vocabulary on both sides"
            )
        plan = replace(plan, student=student)
    if not plan.own_windows and plan.columns % plan.tp_size:
        name = "vocabulary" if plan.draft is None else f"draft vocabulary of --d2t {job.d2t}"
        advice = (
            "pad it with --pad-vocab-to-multiple-of"
            if plan.draft is None
            else f"take a --tp that divides {plan.columns}, or build a map of a multiple of "
            f"{plan.tp_size}"
        )
        raise InputError(
            f"the {name} of {plan.columns} columns is not divisible by TP {plan.tp_size} "
            f"(remainder {plan.columns % plan.tp_size}); {advice}"
        )
    if job.output is not None and plan.own_windows:
        raise InputError(
            "the shards of --reference are cut otherwise than evenly; check them without -o first"
        )
    return plan


def _check_positions(plan: Plan, side: Sharded) -> None:
    at = side.files[0, 0]
    rows, width, _ = at.shape
    padded = plan.layout.total // plan.rows
    if side.cp_size > 1:
        least = most = padded // plan.cp_size
    else:
        least, most = plan.grid.width, padded
    if rows != plan.rows or not least <= width <= most:
        raise InputError(
            f"{side.what} {at.path}: {at.name} has shape {list(at.shape)}, but "
            f"[{plan.rows}, {least}, ...] is rebuilt{' a rank' if side.cp_size > 1 else ''}; "
            "give the logits of the same rows and positions (--student-seq-len, --packed?)"
        )


def _check_gathered(plan: Plan, side: Sharded) -> None:
    if side.width < plan.vocabulary:
        raise InputError(
            f"{side.what} has {plural(side.width, 'column')}; expected the {plan.real} draft "
            "columns or the "
            f"whole vocabulary of {plan.vocabulary}"
        )


def _precision(plan: Plan, reference: Sharded) -> torch.dtype:
    """What the reference's values hold, or were made of, from a few tokens of every teacher:
    the coarsest, for each teacher's own logits may be of another."""
    at = reference.files[0, 0]
    if at.dtype == torch.bfloat16:
        return at.dtype
    found: list[torch.dtype] = []
    with open_tensors([at.path]) as source:
        for places in _sampled(plan, at, reference.cp_size):
            values = _tokens(source, at, places, min(at.shape[2], SAMPLE_COLUMNS))
            found.append(precision_behind(values, scale=plan.scale, softcap=plan.softcap))
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=at.dtype)


def payload_precision(plan: Plan, source: TensorSource) -> torch.dtype | None:
    """What the payload's values hold, where a norm rounds to the same: a model of bfloat16 whose
    dump was widened has a norm that rounds to bfloat16 all the same."""
    at = plan.payload
    norms = [norm for head in plan.heads.values() for norm in (head.norm, head.beside)]
    if at.dtype == torch.bfloat16 or not any(norms):
        return None
    found = [
        stored_precision(_tokens(source, at, places, at.shape[2]))
        for places in _sampled(plan, at, 1)
    ]
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def operands_precision(plan: Plan, source: TensorSource) -> torch.dtype:
    """What the product's operands hold, which the engine's own logits had: the coarsest of the
    dtype that is multiplied in, of the payload's values and of the heads'."""
    found = [plan.compute]
    for places in _sampled(plan, plan.payload, 1):
        found.append(stored_precision(_tokens(source, plan.payload, places, plan.payload.shape[2])))
    for head in plan.heads.values():
        with open_tensors([head.weight.path]) as weights:
            some = weights.read(head.weight.name, slice(0, HEAD_SAMPLE))
        found.append(stored_precision(some.flatten()))
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _sampled(plan: Plan, at: TensorAt, cp_size: int) -> Iterator[list[tuple[int, int]]]:
    """A few (row, position) of a stored tensor for each teacher, of real tokens where it can be
    told."""
    width = at.shape[1]
    for teacher in np.unique(plan.routes).tolist():
        units = np.flatnonzero((plan.routes == teacher) & (plan.lengths > 0)).tolist()
        places = []
        for unit in sorted({units[0], units[len(units) // 2], units[-1]} if units else set()):
            length = max(1, int(plan.lengths[unit]) // cp_size)
            start = int(plan.layout.cu_seqlens_padded[unit]) // cp_size if plan.packed else 0
            for s in sorted({0, length // 3, length // 2, max(0, length - 2)}):
                if start + s < width:
                    places.append((0 if plan.packed else unit, start + s))
        if places:
            yield places


def _tokens(
    source: TensorSource, at: TensorAt, places: Sequence[tuple[int, int]], columns: int
) -> Tensor:
    boxes = [(slice(row, row + 1), slice(s, s + 1), slice(0, columns)) for row, s in places]
    return torch.cat([source.read(at.name, *box).flatten() for box in boxes])
