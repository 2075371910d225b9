"""The whole report for people: checks, places, pictures, diagnosis, and the verdict last."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from opdtool.findings import Bars, Diagnosis, Finding, Report, Section, Strip, Table
from opdtool.report import text as t
from opdtool.report.paint import MARKS, STYLES, Line, cells, pad, paint

BAR_CELLS = 40
WIDE = 120
"""Where lines are folded off a terminal, such as in the log of a pipeline."""
MIN_MESSAGE = 30
"""A message column narrower than this goes below its check instead."""
EIGHTHS = " ▏▎▍▌▋▊▉"


def full(report: Report, *, width: int | None = None, color: bool = False) -> str:
    """The report as ``--format full`` prints it (see :func:`opdtool.report.render`)."""
    return paint(_rows(report, width), color=color)


def _rows(report: Report, terminal: int | None) -> Iterator[Line]:
    width = terminal or WIDE
    head = Line().add(f"opdtool {t.one_line(report.command)}", "bold")
    yield head.add("".join(f"  {t.one_line(path)}" for path in report.inputs))
    if report.geometry:
        yield Line().add(t.geometry_text(report), "dim")
    if report.findings:
        yield Line()
        yield from _checks(report.findings, terminal)
    for finding in report.findings:
        if finding.first:
            yield Line()
            yield from _places(finding)
    for section in report.sections:
        yield Line()
        yield from draw(section, width)
    if report.diagnosis:
        yield Line()
        yield Line().add("Diagnosis", "bold")
        for entry in report.diagnosis:
            yield from _diagnosis(entry, width)
    if report.notes:
        yield Line()
        for note in report.notes:
            yield from _folded(note, "", width)
    yield Line()
    yield Line().add(t.verdict(report), STYLES[t.outcome(report)])


def _checks(findings: Sequence[Finding], terminal: int | None) -> Iterator[Line]:
    """One line a check; a message that does not fit is folded, names never are."""
    steps = any(finding.step for finding in findings)
    cols = [
        [t.one_line(f.step or "") for f in findings] if steps else [],
        [f.code for f in findings],
        [f.name for f in findings],
        [t.one_line(f.tensor or "") for f in findings],
        [t.wrong_of(f) for f in findings],
    ]
    cols = [col for col in cols if any(col)]
    widths = [max(map(cells, col)) for col in cols]
    indent = 3 + sum(widths) + 2 * len(widths)
    # Off a terminal a row may be wider where names are long: what it says stays beside them.
    width = terminal or max(WIDE, indent + 60)
    room = width - indent
    for i, finding in enumerate(findings):
        style = STYLES[finding.status]
        line = Line().add(f" {MARKS[finding.status]} ", style)
        for col, size in zip(cols, widths, strict=True):
            # Counts are the last column and the only numbers.
            numeric = col is cols[-1] and any(f.mismatches is not None for f in findings)
            line.add(pad(col[i], size, right=numeric) + "  ")
        words = t.one_line(finding.message)
        if cells(words) <= room:
            yield line.add(words, "" if finding.status == "pass" else style)
        elif room >= MIN_MESSAGE:
            first, *rest = wrap(words, room)
            yield line.add(first, "" if finding.status == "pass" else style)
            for part in rest:
                yield Line().add(" " * indent).add(part)
        else:
            yield line
            yield from _folded(words, "     ", width)


def _places(finding: Finding) -> Iterator[Line]:
    shown, more = len(finding.first), t.more_places(finding)
    which = f"all {shown}" if shown > 1 else "one"
    if more:
        which = f"first {shown} of {t.count(finding.mismatches or 0)}"
    yield Line().add(t.label(finding), "bold").add(f": {which} at")
    names = t.columns(finding.first)
    rows = [tuple(t.value(place.get(name)) for name in names) for place in finding.first]
    text = frozenset(
        name for name in names if any(isinstance(place.get(name), str) for place in finding.first)
    )
    yield from _grid(names, rows, frozenset(names) - text)
    if more:
        yield Line().add(f"  and {t.count(more)} more", "dim")


def _diagnosis(entry: Diagnosis, width: int) -> Iterator[Line]:
    step = f"  {t.one_line(entry.step)}:" if entry.step else " "
    yield (
        Line()
        .add(f"{step} ")
        .add(t.fault_names(entry), "bold red")
        .add(f" ({t.match_text(entry)})")
    )
    yield from _folded(entry.message, "    ", width)
    yield from _folded(entry.fix, "    fix: ", width)


def draw(section: Section, width: int) -> Iterator[Line]:
    """One picture as lines."""
    yield Line().add(t.one_line(section.title), "bold")
    if isinstance(section, Table):
        rows = [tuple(t.one_line(cell) for cell in row) for row in section.rows]
        yield from _grid([t.one_line(c) for c in section.columns], rows, section.numeric)
    elif isinstance(section, Bars):
        yield from _bars(section)
    else:
        yield from _strip(section, width)


def _grid(
    names: Sequence[str], rows: Sequence[Sequence[str]], numeric: frozenset[str]
) -> Iterator[Line]:
    widths = [max([cells(name), *(cells(row[i]) for row in rows)]) for i, name in enumerate(names)]
    right = [name in numeric for name in names]
    for row, style in [(names, "dim"), *((row, "") for row in rows)]:
        fields = (pad(c, w, right=r) for c, w, r in zip(row, widths, right, strict=True))
        yield Line().add("  " + "  ".join(fields), style)


def _bars(bars: Bars) -> Iterator[Line]:
    labels = [t.one_line(label) for label in bars.labels]
    values = [t.number(value, bars.unit) for value in bars.values]
    wide = max(map(cells, labels), default=0)
    numbers = max(map(cells, values), default=0)
    for label, text, value in zip(labels, values, bars.values, strict=True):
        eighths = round(t.share(value, bars.limit) * BAR_CELLS * 8)
        bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
        line = Line().add(f"  {pad(label, wide)}  ").add(pad(bar, BAR_CELLS), "cyan")
        yield line.add(f"  {pad(text, numbers, right=True)}")


def _strip(strip: Strip, width: int) -> Iterator[Line]:
    """The rows above each other, wrong columns marked below; folded into blocks to fit."""
    rows = [(t.one_line(label), [t.one_line(c) for c in slots]) for label, slots in strip.rows]
    length = max((len(slots) for _, slots in rows), default=0)
    wide = max((cells(label) for label, _ in rows), default=0)
    size = max((cells(c) for _, slots in rows for c in slots), default=1)
    per_block = max(1, (width - wide - 4) // (size + 1))
    for start in range(0, length, max(1, per_block)):
        stop = min(length, start + per_block)
        if start:
            yield Line()
        for label, slots in rows:
            line = Line().add(f"  {pad(label, wide)} ", "dim")
            for i, cell in enumerate(slots[start:stop], start):
                line.add(" ").add(pad(cell, size, right=True), _wrong(strip, i))
            yield line
        marks = ["^" if i in strip.wrong else "" for i in range(start, stop)]
        if any(marks):
            line = Line().add(" " * (wide + 3))
            yield line.add("".join(" " + pad(mark, size, right=True) for mark in marks), "bold red")


def _wrong(strip: Strip, column: int) -> str:
    return "bold red" if column in strip.wrong else ""


def wrap(words: str, room: int) -> list[str]:
    """The words in lines of so many columns; a word, such as a name, is never broken."""
    return textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False)


def _folded(words: str, head: str, width: int) -> Iterator[Line]:
    """Text behind a head, its further lines indented below."""
    indent = " " * cells(head)
    for row in t.lines(words):
        for part in wrap(row, max(MIN_MESSAGE, width - cells(indent))) or [""]:
            yield Line().add(head + part)
            head = indent
