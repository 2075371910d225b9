"""Markdown, for pull-request comments and step summaries."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from opdtool.findings import Bars, Finding, Report, Section, Strip, Table
from opdtool.report import text as t
from opdtool.report.paint import cells, pad

ICONS = {"pass": "✅ pass", "fail": "❌ fail", "warn": "⚠️ warn", "skip": "➖ skip"}


def markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown; file names and messages are escaped."""
    return "\n".join(_rows(report)).rstrip("\n") + "\n"


def _rows(report: Report) -> Iterator[str]:
    yield f"## opdtool {_escape(report.command)}"
    yield ""
    if report.inputs:
        yield "Inputs: " + ", ".join(_code(path) for path in report.inputs)
        yield ""
    if report.geometry:
        yield f"Geometry: {_escape(t.geometry_text(report))}"
        yield ""
    if report.findings:
        yield from _checks(report.findings)
    for finding in report.findings:
        if finding.first:
            yield from _places(finding)
    if report.diagnosis:
        yield "### Diagnosis"
        yield ""
        for entry in report.diagnosis:
            step = f"{_escape(entry.step)}: " if entry.step else ""
            yield f"- {step}**`{t.fault_names(entry)}`** ({t.match_text(entry)})"
            yield f"  {_escape(t.sentence(entry.message))}"
            yield f"  Fix: {_escape(t.one_line(entry.fix))}"
        yield ""
    for section in report.sections:
        yield from _section(section)
    for note in report.notes:
        yield _escape(t.one_line(note))
        yield ""
    yield f"**{_escape(t.verdict(report))}**"


def _checks(findings: Sequence[Finding]) -> Iterator[str]:
    steps = any(finding.step for finding in findings)
    head = ["step"] * steps + ["status", "code", "check", "tensor", "wrong", "message"]
    rows = [
        [_escape(f.step or "")] * steps
        + [ICONS[f.status], f.code, f.name, _code(f.tensor or ""), t.wrong_of(f)]
        + [_escape(t.one_line(f.message))]
        for f in findings
    ]
    yield from _grid(head, rows, frozenset({"wrong"}))


def _places(finding: Finding) -> Iterator[str]:
    more = t.more_places(finding)
    which = f"first {len(finding.first)} of {t.count(finding.mismatches or 0)}"
    tail = f", {which}" if more else ""
    yield f"**{_escape(t.label(finding))}**{tail}"
    yield ""
    names = t.columns(finding.first)
    rows = [[_escape(t.value(place.get(name))) for name in names] for place in finding.first]
    yield from _grid([_escape(name) for name in names], rows, frozenset(map(_escape, names)))


def _section(section: Section) -> Iterator[str]:
    yield f"### {_escape(t.one_line(section.title))}"
    yield ""
    if isinstance(section, Table):
        rows = [[_escape(t.one_line(cell)) for cell in row] for row in section.rows]
        names = [_escape(t.one_line(name)) for name in section.columns]
        yield from _grid(names, rows, frozenset(_escape(name) for name in section.numeric))
    elif isinstance(section, Bars):
        yield from _bars(section)
    else:
        yield from _strip(section)


def _bars(bars: Bars) -> Iterator[str]:
    rows = [
        [_escape(t.one_line(name)), "`" + _bar(value, bars.limit) + "`", t.number(value, bars.unit)]
        for name, value in zip(bars.labels, bars.values, strict=True)
    ]
    yield from _grid(["", "", "value"], rows, frozenset({"value"}))


def _bar(value: float, limit: float) -> str:
    full = round(20 * t.share(value, limit))
    return "█" * full + "░" * (20 - full)


def _strip(strip: Strip) -> Iterator[str]:
    rows = [(t.one_line(name), [t.one_line(c) for c in slots]) for name, slots in strip.rows]
    wide = max((cells(name) for name, _ in rows), default=0)
    size = max((cells(c) for _, slots in rows for c in slots), default=1)
    # Indented rather than fenced: no run of backticks in a name can end the block.
    for name, slots in rows:
        line = pad(name, wide) + " " + "".join(" " + pad(c, size, right=True) for c in slots)
        yield f"    {line}"
    length = max((len(slots) for _, slots in rows), default=0)
    marks = "".join(
        " " + pad("^" if i in strip.wrong else "", size, right=True) for i in range(length)
    )
    if strip.wrong:
        yield f"    {' ' * (wide + 1)}{marks}".rstrip()
    yield ""


def _grid(
    names: Sequence[str], rows: Sequence[Sequence[str]], numeric: frozenset[str]
) -> Iterator[str]:
    yield "| " + " | ".join(names) + " |"
    yield "|" + "|".join(" ---: " if name in numeric else " --- " for name in names) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, also in a table's cell."""
    text = t.one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore inside a word emphasises nothing, and names are full of them.
    return re.sub(r"[\\`*\[\]|#~@]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _code(text: str) -> str:
    """A name in code style; a backtick or a pipe inside would end it, so those are escaped."""
    if not text:
        return ""
    safe = t.one_line(text)
    return _escape(safe) if "`" in safe or "|" in safe else f"`{safe}`"
