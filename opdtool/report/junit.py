"""JUnit XML: one test case a check, also when all pass.

Without times, which may be left out: the same input gives the same report on every run.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from opdtool.findings import Finding, Report
from opdtool.report.text import (
    clean,
    fault_names,
    label,
    lines,
    match_text,
    more_places,
    place_text,
    value,
    verdict,
    wrong_of,
)

TAGS = {"fail": "failure", "skip": "skipped", "warn": "system-out"}


def junit(report: Report) -> str:
    """The report as one test suite, which CI systems show beside the unit tests."""
    counts = report.summary
    name = f"opdtool {report.command}"
    total = f'tests="{len(report.findings)}" failures="{counts["failed"]}" errors="0"'
    total += f' skipped="{counts["skipped"]}"'
    rows = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {total}>"]
    rows.append(f"  <testsuite name={_attr(name)} {total}>")
    if report.geometry:
        rows.append("    <properties>")
        for key, item in report.geometry.items():
            rows.append(f"      <property name={_attr(key)} value={_attr(value(item))}/>")
        rows.append("    </properties>")
    for finding in report.findings:
        rows += _case(report, finding)
    rows.append(f"    <system-out>{_text(verdict(report))}</system-out>")
    rows += ["  </testsuite>", "</testsuites>"]
    return "\n".join(rows) + "\n"


def _case(report: Report, finding: Finding) -> list[str]:
    suite = f"opdtool.{report.command}" + (f".{finding.step}" if finding.step else "")
    name = " ".join(filter(None, [finding.code, finding.name, finding.tensor]))
    head = f"    <testcase classname={_attr(suite)} name={_attr(name)}"
    if finding.status == "pass":
        return [head + "/>"]
    tag = TAGS[finding.status]
    message = f" message={_attr(finding.message)}" if tag != "system-out" else ""
    kind = f' type="{finding.code}"' if tag == "failure" else ""
    body = _text("\n".join(_body(report, finding)))
    return [head + ">", f"      <{tag}{message}{kind}>{body}</{tag}>", "    </testcase>"]


def _body(report: Report, finding: Finding) -> list[str]:
    word = "warning: " if finding.status == "warn" else ""
    rows = [word + row for row in lines(f"{label(finding)}: {finding.message}")]
    if finding.mismatches is not None:
        rows.append(f"mismatches: {wrong_of(finding)}")
    rows += [place_text(place) for place in finding.first]
    if more_places(finding):
        rows.append(f"and {more_places(finding):,} more")
    if finding.status == "fail":
        for entry in report.diagnosis:
            if entry.step == finding.step:
                rows.append(f"diagnosis: {fault_names(entry)} ({match_text(entry)})")
                rows += lines(entry.message) + lines(f"fix: {entry.fix}")
    return rows


def _attr(text: str) -> str:
    return quoteattr(clean(text, keep="\n"), {"\n": "&#10;"})


def _text(text: str) -> str:
    # U+FFFE and U+FFFF do not print, so `clean` has already replaced all that XML forbids.
    return escape(clean(text, keep="\n"))
