"""The report as one picture: verdict, checks, diagnosis, charts and strips."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import quoteattr

from opdtool.core.words import plural
from opdtool.findings import Report, Section, Table
from opdtool.report import text as t
from opdtool.report.paint import MARKS, cells
from opdtool.report.pictures import CHAR, ROW, STYLE, Picture, picture, words

MARGIN = 16
MANY = 40
"""More checks that passed than this, as a suite has, are one line."""


def svg(report: Report) -> str:
    """The report as a self-contained SVG file, drawn for light and dark pages."""
    y, width, parts = float(MARGIN), 320.0, []
    for block in _blocks(report):
        parts.append(f'<g transform="translate({MARGIN} {y:g})">{block.body}</g>')
        y += block.height
        width = max(width, block.width)
    width, height = width + 2 * MARGIN, y + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f"aria-label={quoteattr(t.verdict(report))} "
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">\n'
        f'<style>{STYLE}</style>\n<rect class="page" width="100%" height="100%"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _blocks(report: Report) -> Iterator[Picture]:
    verdict = t.verdict(report)
    yield _line(verdict, f"h {t.outcome(report)}")
    if report.geometry:
        yield _line(t.geometry_text(report), "dim")
    if report.findings:
        yield _gap()
    passed = report.summary["passed"]
    if passed > MANY:
        yield _line(f"{MARKS['pass']} {plural(passed, 'check', ',')} passed", "pass")
    for finding in report.findings:
        if finding.status == "pass" and passed > MANY:
            continue
        text = f"{MARKS[finding.status]} {t.label(finding)}"
        wrong = t.wrong_of(finding) if finding.mismatches else ""
        yield _line(f"{text}  {wrong}".rstrip(), finding.status)
    for entry in report.diagnosis:
        yield _gap()
        yield _line(f"{t.fault_names(entry)} ({t.match_text(entry)})", "h fail")
        yield _line(entry.message)
        yield _line(f"fix: {entry.fix}")
    for section in report.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[Picture]:
    if isinstance(section, Table) and not section.columns:
        return
    yield _gap()
    yield _line(section.title, "h")
    yield picture(section)


def _line(text: str, classes: str = "") -> Picture:
    text = t.one_line(text)
    return Picture(CHAR * cells(text) + 4, ROW, words(0, 14, text, classes))


def _gap() -> Picture:
    return Picture(0, ROW / 2, "")
