"""One line for each finding that did not pass, the diagnosis, the verdict."""

from __future__ import annotations

from opdtool.findings import Finding, Report
from opdtool.report.paint import STYLES, Line, paint
from opdtool.report.text import (
    fault_names,
    label,
    match_text,
    one_line,
    outcome,
    place_text,
    sentence,
    verdict,
    wrong_of,
)


def concise(report: Report, *, color: bool = False, failures_alone: bool = False) -> str:
    """The report in as few lines as name everything that is wrong.

    ``failures_alone`` leaves warnings and skips out, which the verdict still counts.
    """
    shown = ("fail",) if failures_alone else ("fail", "warn", "skip")
    rows = [_finding(finding) for finding in report.findings if finding.status in shown]
    if not report.findings:  # a command that made something says what
        rows += [Line().add(one_line(note)) for note in report.notes]
    for entry in report.diagnosis:
        step = f"{one_line(entry.step)}: " if entry.step else ""
        head = f"diagnosis {step}{fault_names(entry)} ({match_text(entry)})"
        rows.append(
            Line().add(head, "bold").add(f": {sentence(entry.message)} Fix: {one_line(entry.fix)}")
        )
    rows.append(Line().add(verdict(report), STYLES[outcome(report)]))
    return paint(rows, color=color)


def _finding(finding: Finding) -> Line:
    line = Line().add(finding.status, STYLES[finding.status]).add(f" {label(finding)}: ")
    line.add(one_line(finding.message))
    # Many a message gives the count and the first place itself.
    details = []
    if finding.mismatches and f"{finding.mismatches:,} of" not in finding.message:
        details.append(wrong_of(finding))
    if "first" not in finding.message:
        details += [f"first at {place_text(place)}" for place in finding.first[:1]]
    return line.add(f" [{'; '.join(details)}]") if details else line
