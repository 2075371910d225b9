"""What ``opdtool reconstruct`` says: findings, figures, pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opdtool.checks import teacher as checks
from opdtool.core.words import plural
from opdtool.findings import Bars, Diagnosis, Finding, Report, Scalar, Section, Table
from opdtool.jobs.reconstruct.figures import format_least, format_number, number, rounded_up
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.logprobs import compare_scores, scores_note, scores_table
from opdtool.jobs.reconstruct.merge import Compared, Located, Part, compared, locate
from opdtool.jobs.reconstruct.plan import Floats, Plan, Sharded
from opdtool.jobs.reconstruct.student import compare_student, divergence_table

REBUILT = "teacher_logits"


def make_report(
    job: ReconstructJob,
    plan: Plan,
    parts: Sequence[Part],
    identity: Finding | None,
    diagnosis: Sequence[Diagnosis],
) -> Report:
    """The report of one run."""
    findings = [_finite(plan, parts)]
    stats: dict[str, Any] = {"logits": _range(parts)}
    sections: list[Section] = []
    notes = _notes(job, plan)
    found = compared(plan, parts)
    if plan.reference is not None and found is not None and plan.bound is not None:
        findings += _reference_findings(plan, plan.reference, found)
        figures = _reference_figures(plan, found)
        stats["reference"] = figures
        sections += [_reference_table(figures), _error_bars(found)]
        notes.append(f"tolerance: {plan.bound.describe()}")
    if identity is not None:
        findings.append(identity)
    if plan.scored is not None:
        finding, scores = compare_scores(plan, parts)
        findings.append(finding)
        stats["logprobs"] = scores
        sections.append(scores_table(scores))
        notes.append(scores_note(scores))
    if plan.student is not None:
        finding, divergences = compare_student(plan, parts)
        findings.append(finding)
        stats["student"] = divergences
        sections.append(divergence_table(divergences))
    return Report(
        command="reconstruct",
        geometry={
            "tp": plan.tp_size,
            "cp": plan.cp_size,
            "sequences": plan.layout.num_segments,
            "positions": plan.layout.total,
            "vocabulary": plan.vocabulary,
            "columns": plan.columns,
            "padding_columns": plan.columns - plan.real,
            "hidden": plan.width or None,
            "dtype": str(plan.compute).removeprefix("torch."),
        },
        findings=tuple(findings),
        diagnosis=tuple(diagnosis),
        stats=stats,
        sections=tuple(sections),
        notes=tuple(notes),
        inputs=tuple(
            str(path)
            for path in (
                job.payload,
                *(spec.path for spec in job.heads),
                *job.reference,
                *job.student,
                *([job.logprobs] if job.logprobs else []),
            )
        ),
    )


def _notes(job: ReconstructJob, plan: Plan) -> list[str]:
    notes = []
    if job.output is not None:
        notes.append(f"wrote {plural(plan.tp_size * plan.cp_size, 'file')} to {job.output}")
    if plan.kind == "logits" and job.heads:
        notes.append("the payload is logits: no head was used")
    if plan.columns > plan.real:
        notes.append(
            f"columns {plan.real}..{plan.columns - 1} pad the vocabulary: zero, in no softmax"
        )
    behind = plan.layout.total - int(plan.lengths.sum())
    held = behind if plan.packed else plan.rows * plan.grid.width - int(plan.lengths.sum())
    if held:
        notes.append(f"{plural(held, 'position', ',')} behind the real tokens are not judged")
    normed = sorted(i for i, head in plan.heads.items() if head.norm is not None)
    if normed:
        plain = sorted(set(plan.heads) - set(normed))
        rest = f"; not to teachers {', '.join(map(str, plain))}" if plain else ""
        notes.append(f"the final norm was applied to teachers {', '.join(map(str, normed))}{rest}")
    if plan.reference is not None and plan.precision not in (None, plan.reference.dtype):
        stored, holds = (
            str(dtype).removeprefix("torch.") for dtype in (plan.reference.dtype, plan.precision)
        )
        at = " or was made of" if plan.scale is not None or plan.softcap is not None else ""
        notes.append(f"the reference is {stored}, but all that it holds{at} is {holds}")
    return notes


def _range(parts: Sequence[Part]) -> dict[str, Scalar]:
    return {
        "min": number(min(part.result.extent.low for part in parts)),
        "max": number(max(part.result.extent.high for part in parts)),
        "not_finite": sum(part.result.extent.not_finite for part in parts),
    }


def _finite(plan: Plan, parts: Sequence[Part]) -> Finding:
    total = sum(len(part.result.slots) for part in parts) * plan.real
    figures = _range(parts)
    first: list[Mapping[str, Scalar]] = []
    for part in parts:
        for slot, column, value in part.result.extent.first:
            unit, position, tp_rank, cp_rank = locate(plan, part, slot, column)
            where = Located(unit, position, column, tp_rank, cp_rank, value, math.nan)
            place = where.place(plan)
            del place["expected"], place["actual"]
            first.append(place | {"actual": number(value)})
    low, high = (
        min(part.result.extent.low for part in parts),
        max(part.result.extent.high for part in parts),
    )
    return checks.logits_finite(REBUILT, total, int(figures["not_finite"] or 0), low, high, first)


def _reference_findings(plan: Plan, reference: Sharded, found: Compared) -> list[Finding]:
    name = next(iter(reference.files.values())).name
    assert plan.bound is not None
    expected = plan.vocabulary if reference.gathered else plan.columns
    columns = checks.reference_columns(
        name,
        np.diff(reference.starts).tolist(),
        expected,
        also=plan.vocabulary if plan.draft is None else None,
    )
    values = checks.logits_match(
        name,
        found.total,
        found.mismatches,
        found.multiple[0],
        plan.bound.describe(),
        [element.place(plan) for element in found.first],
    )
    return [columns, values]


def _reference_figures(plan: Plan, found: Compared) -> dict[str, Any]:
    def greatest(pair: tuple[float, Located | None]) -> dict[str, Any]:
        value, where = pair
        return {"value": number(value), "place": where.place(plan) if where else None}

    def worst(values: Floats) -> dict[str, Any]:
        at = int(np.argmax(np.nan_to_num(values, nan=np.inf)))
        place = {"sequence": int(found.unit[at]), "position": int(found.position[at])}
        return {"value": number(float(values[at])), "place": place}

    assert plan.bound is not None
    assert plan.reference is not None
    return {
        "dtype": str(plan.reference.dtype).removeprefix("torch."),
        "precision": str(plan.precision or plan.reference.dtype).removeprefix("torch."),
        "tolerance": plan.bound.describe(),
        "tolerance_terms": {
            "relative": plan.bound.relative,
            "accumulation": plan.bound.accumulation,
            "operand": plan.bound.operand,
            "absolute": plan.bound.absolute,
        },
        "positions": len(found.unit),
        "max_abs_error": greatest(found.absolute),
        "max_rel_error": greatest(found.relative),
        "max_logprob_error": worst(found.log_prob_errors),
        "top1_agreement": number(float(found.agrees.mean())),
        "kl": {
            "mean": number(float(found.divergences.mean())),
            "max": worst(found.divergences),
        },
        "least_tolerance": {
            "atol": number(found.absolute[0]),
            "rtol": number(rounded_up(found.relative[0])),
            "multiple": number(found.multiple[0]),
        },
        "equal": found.exact,
    }


def _reference_table(figures: Mapping[str, Any]) -> Table:
    def shown(entry: Mapping[str, Any]) -> tuple[str, str]:
        # Where nothing differs no place is the worst.
        place = (entry["place"] or {}) if entry["value"] else {}
        where = ", ".join(
            f"{key} {value}" for key, value in place.items() if key not in ("expected", "actual")
        )
        return format_number(entry["value"]), where

    least = figures["least_tolerance"]
    rows = (
        ("greatest absolute error", *shown(figures["max_abs_error"])),
        ("greatest relative error", *shown(figures["max_rel_error"])),
        ("greatest log-probability error", *shown(figures["max_logprob_error"])),
        ("top-1 agreement", f"{100 * float(figures['top1_agreement']):.4g} %", ""),
        ("KL(reference || rebuilt), mean", format_number(figures["kl"]["mean"]), ""),
        ("KL(reference || rebuilt), greatest", *shown(figures["kl"]["max"])),
        ("least --atol that would pass", format_least(least["atol"]), "without --rtol"),
        ("least --rtol that would pass", format_least(least["rtol"]), "without --atol"),
        ("worst error / its tolerance", format_number(least["multiple"]), "passes up to 1"),
    )
    return Table(
        title="rebuilt against reference",
        columns=("figure", "value", "where"),
        rows=rows,
        numeric=frozenset({"value"}),
    )


def _error_bars(found: Compared) -> Bars:
    """How many positions have their greatest log-probability error in which decade."""
    edges = [10.0**k for k in range(-7, 2)]
    counts, last = [], 0
    errors = np.nan_to_num(found.log_prob_errors, nan=np.inf)
    for edge in edges:
        below = int((errors <= edge).sum())
        counts.append(below - last)
        last = below
    labels = [f"up to 1e{k}" for k in range(-7, 2)] + ["more"]
    counts.append(len(errors) - last)
    return Bars(
        title="positions by their greatest log-probability error",
        labels=tuple(labels),
        values=tuple(float(count) for count in counts),
        limit=float(max(counts)),
    )
