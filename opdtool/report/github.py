"""GitHub Actions workflow commands: an annotation for each failure and warning."""

from __future__ import annotations

from opdtool.findings import Diagnosis, Finding, Report
from opdtool.report.text import (
    clean,
    fault_names,
    label,
    match_text,
    more_places,
    one_line,
    place_text,
    sentence,
    verdict,
    wrong_of,
)


def github(report: Report) -> str:
    """The report as ``::error`` and ``::warning`` lines, the verdict in plain text last."""
    rows = [_finding(f) for f in report.findings if f.status in ("fail", "warn")]
    rows += [_diagnosis(entry) for entry in report.diagnosis]
    # `::` at the start of a line is what GitHub reads as a command.
    rows.append(verdict(report))
    return "\n".join(rows) + "\n"


def _finding(finding: Finding) -> str:
    body = [one_line(finding.message)]
    if finding.mismatches is not None:
        body.append(f"mismatches: {wrong_of(finding)}")
    body += [place_text(place) for place in finding.first]
    if more_places(finding):
        body.append(f"and {more_places(finding):,} more")
    kind = "error" if finding.status == "fail" else "warning"
    return f"::{kind} title={_property(label(finding))}::{_data(chr(10).join(body))}"


def _diagnosis(entry: Diagnosis) -> str:
    step = f"{entry.step}: " if entry.step else ""
    title = f"{step}{fault_names(entry)} ({match_text(entry)})"
    body = f"{sentence(entry.message)}\nFix: {entry.fix}"
    return f"::notice title={_property(title)}::{_data(body)}"


def _data(text: str) -> str:
    return clean(text, keep="\n").replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
