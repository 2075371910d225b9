"""Reports for programs: one JSON document, or one JSON line a finding."""

from __future__ import annotations

import json as _json
import math
from collections.abc import Mapping
from typing import Any

from opdtool.findings import SCHEMA, Diagnosis, Finding, Report


def json(report: Report) -> str:
    """The report as one JSON document with sorted keys (contract 6)."""
    return _dumps(document(report), indent=2) + "\n"


def jsonl(report: Report) -> str:
    """One line a check, one a diagnosis, and a last one of ``type`` ``summary``."""
    whole = document(report)
    rows = [{"type": "check", **check} for check in whole.pop("checks")]
    rows += [{"type": "diagnosis", **entry} for entry in whole.pop("diagnosis")]
    rows.append({"type": "summary", **whole})
    return "".join(_dumps(row) + "\n" for row in rows)


def document(report: Report) -> dict[str, Any]:
    """The report as the JSON values of ``report.schema.json``."""
    return {
        "schema": SCHEMA,
        "command": report.command,
        "passed": report.passed,
        "geometry": plain(report.geometry),
        "checks": [_check(finding) for finding in report.findings],
        "diagnosis": [_diagnosis(entry) for entry in report.diagnosis],
        "stats": plain(report.stats),
        "summary": report.summary,
    }


def _check(finding: Finding) -> dict[str, Any]:
    check = {
        "code": finding.code,
        "name": finding.name,
        "status": finding.status,
        "message": finding.message,
        "tensor": finding.tensor,
        "mismatches": plain(finding.mismatches),
        "total": plain(finding.total),
        "first": [plain(place) for place in finding.first],
    }
    return check if finding.step is None else check | {"step": finding.step}


def _diagnosis(entry: Diagnosis) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fault": entry.fault,
        "match": entry.match,
        "message": entry.message,
        "fix": entry.fix,
    }
    if entry.score is not None:
        found["score"] = plain(entry.score)
    if entry.faults:
        found["faults"] = list(entry.faults)
    if entry.step is not None:
        found["step"] = entry.step
    return found


def plain(item: Any) -> Any:
    """The value as JSON can hold it: NaN and infinities become the strings ``nan``, ``inf``
    and ``-inf``, tuples and sets lists, anything with ``.item()`` (a numpy scalar) that."""
    if item is None or isinstance(item, str | bool | int):
        return item
    if isinstance(item, float):
        return float(item) if math.isfinite(item) else str(float(item))
    if isinstance(item, Mapping):
        return {str(key): plain(inner) for key, inner in item.items()}
    if isinstance(item, set | frozenset):
        return [plain(inner) for inner in sorted(item)]
    if isinstance(item, list | tuple):
        return [plain(inner) for inner in item]
    if hasattr(item, "item"):
        return plain(item.item())
    return str(item)


def _dumps(item: Any, indent: int | None = None) -> str:
    # ASCII: the same bytes whatever the terminal's encoding, lone surrogates included.
    return _json.dumps(item, indent=indent, sort_keys=True, allow_nan=False)
