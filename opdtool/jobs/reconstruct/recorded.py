"""The reference and the student of a plan: found, fitted to it, and how precise they are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from opdtool.core.bounds import precision_behind
from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.tensors import open_tensors
from opdtool.jobs.reconstruct.bounds import plan_bound
from opdtool.jobs.reconstruct.find import find_sharded
from opdtool.jobs.reconstruct.job import LOGITS, ReconstructJob
from opdtool.jobs.reconstruct.plan import Plan, Sharded

SAMPLE_COLUMNS = 4096


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
    """What the reference's values hold, or were made of, from a few tokens."""
    at = reference.files[0, 0]
    if at.dtype == torch.bfloat16:
        return at.dtype
    B, S, V = at.shape
    with open_tensors([at.path]) as source:
        rows = [0] if B == 1 else [0, B // 2, B - 1]
        parts: list[Tensor] = []
        for row in sorted(set(rows)):
            for s in sorted({0, S // 3, S // 2, max(0, S - 2)}):
                box = (slice(row, row + 1), slice(s, s + 1), slice(0, min(V, SAMPLE_COLUMNS)))
                parts.append(source.read(at.name, *box).flatten())
    return precision_behind(torch.cat(parts), scale=plan.scale, softcap=plan.softcap)
