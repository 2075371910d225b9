"""Divergences of a student from the rebuilt teacher, weighed by the mask."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from opdtool.checks import teacher as checks
from opdtool.core.words import plural
from opdtool.findings import Finding, Table
from opdtool.jobs.reconstruct.figures import format_number, number
from opdtool.jobs.reconstruct.merge import Part
from opdtool.jobs.reconstruct.plan import Floats, Plan


def compare_student(plan: Plan, parts: Sequence[Part]) -> tuple[Finding, dict[str, Any]]:
    """Divergences of student and teacher, weighed by the mask."""
    assert plan.student is not None
    assert plan.weights is not None
    columns: dict[str, list[Floats]] = {name: [] for name in _DIVERGENCES}
    units, positions, weights = [], [], []
    for part in parts:
        assert part.result.divergence is not None
        found = part.result.divergence.result()
        for name in _DIVERGENCES:
            columns[name].append(getattr(found, name).to(torch.float64).numpy())
        slots = plan.layout.cu_seqlens_padded[part.result.unit] + part.result.position
        units.append(part.result.unit)
        positions.append(part.result.position)
        weights.append(plan.weights[slots])
    unit, position = np.concatenate(units), np.concatenate(positions)
    weight = np.concatenate(weights)
    counted = weight != 0
    values = {name: np.concatenate(parts) for name, parts in columns.items()}
    stats: dict[str, Any] = {
        "weight": number(float(weight.sum())),
        "positions": int(counted.sum()),
        "weighted_by": "draft token mask" if plan.masked else "real positions",
    }
    for name, label in _DIVERGENCES.items():
        value = values[name]
        total = float(weight.sum())
        mean = float((value[counted] * weight[counted]).sum() / total) if total else math.nan
        entry: dict[str, Any] = {"mean": number(mean)}
        if counted.any():
            some = np.flatnonzero(counted)
            at = int(some[np.argmax(np.nan_to_num(value[some], nan=np.inf))])
            entry["max"] = number(float(value[at]))
            entry["place"] = {"sequence": int(unit[at]), "position": int(position[at])}
        stats[label] = entry
    both = np.isfinite(values["forward"]) & np.isfinite(values["reverse"])
    bad = np.flatnonzero(counted & ~both)
    order = np.lexsort((position[bad], unit[bad]))[:10]
    first = [{"sequence": int(unit[i]), "position": int(position[i])} for i in bad[order].tolist()]
    name = next(iter(plan.student.files.values())).name
    return checks.divergence_finite(name, int(counted.sum()), len(bad), first), stats


_DIVERGENCES = {
    "forward": "forward_kl",
    "reverse": "reverse_kl",
    "teacher_entropy": "teacher_entropy",
    "student_entropy": "student_entropy",
}


def divergence_table(stats: Mapping[str, Any]) -> Table:
    """The figures of :func:`compare_student` in rows."""
    names = {
        "forward_kl": "KL(teacher || student)",
        "reverse_kl": "KL(student || teacher)",
        "teacher_entropy": "entropy of the teacher",
        "student_entropy": "entropy of the student",
    }
    rows = []
    for key, name in names.items():
        entry = stats[key]
        place = entry.get("place")
        where = f"sequence {place['sequence']}, position {place['position']}" if place else ""
        rows.append((name, format_number(entry["mean"]), format_number(entry.get("max")), where))
    return Table(
        title=f"student against teacher, in nats, over "
        f"{plural(stats['positions'], 'position', ',')} "
        f"weighed by {stats['weighted_by']}",
        columns=("figure", "mean", "greatest", "where"),
        rows=tuple(rows),
        numeric=frozenset({"mean", "greatest"}),
    )
