"""Bar charts and strips as SVG fragments, for the HTML report and the SVG picture.

A picture is its width, its height and its elements from (0, 0); colours come from the
classes of :data:`STYLE`, which knows light and dark.
"""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from opdtool.findings import Bars, Section, Strip, Table
from opdtool.report import text as t
from opdtool.report.paint import cells

CHAR = 7.3
"""Width of one column of 12 px monospace text, in user units."""
ROW = 20
BAR = 320
MANY = 60
"""More bars than this are drawn as thin columns, with their labels as tooltips."""

STYLE = """
.t{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328}
.h{font-weight:600}.dim{fill:#59636e}.end{text-anchor:end}.mid{text-anchor:middle}
.bar{fill:#0969da}.track{fill:#eaeef2}.cell{fill:#f6f8fa;stroke:#d1d9e0}
.bad{fill:#ffebe9;stroke:#d1242f}.pass{fill:#1a7f37}.fail{fill:#d1242f}.warn{fill:#9a6700}
.skip{fill:#59636e}.page{fill:#fff}
@media(prefers-color-scheme:dark){.t{fill:#e6edf3}.dim{fill:#9198a1}.bar{fill:#4493f8}
.track{fill:#262c36}.cell{fill:#151b23;stroke:#3d444d}.bad{fill:#5d1a1c;stroke:#f85149}
.pass{fill:#3fb950}.fail{fill:#f85149}.warn{fill:#d29922}.skip{fill:#9198a1}.page{fill:#0d1117}}
"""


class Picture(NamedTuple):
    """An SVG fragment and the room it takes."""

    width: float
    height: float
    body: str


def words(x: float, y: float, text: str, classes: str = "") -> str:
    """One line of text with its baseline at ``y``; spaces are kept."""
    return (
        f'<text class="t {classes}" x="{x:g}" y="{y:g}" xml:space="preserve">'
        f"{escape(t.one_line(text))}</text>"
    )


def box(x: float, y: float, width: float, height: float, classes: str, title: str = "") -> str:
    """A rectangle, with a tooltip where there is a ``title``."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    if not title:
        return f'<rect class="{classes}" {size}/>'
    return f'<rect class="{classes}" {size}><title>{escape(t.one_line(title))}</title></rect>'


def svg(picture: Picture, name: str) -> str:
    """A picture as an inline ``<svg>`` with an accessible name."""
    width, height = f"{picture.width:g}", f"{picture.height:g}"
    return (
        f'<svg role="img" aria-label={quoteattr(t.one_line(name))} width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{picture.body}</svg>'
    )


def picture(section: Section) -> Picture:
    """One section drawn, without its title."""
    if isinstance(section, Bars):
        return _columns(section) if len(section.values) > MANY else _bars(section)
    if isinstance(section, Strip):
        return _strip(section)
    return _table(section)


def _bars(bars: Bars) -> Picture:
    labels = [t.one_line(label) for label in bars.labels]
    values = [t.number(value, bars.unit) for value in bars.values]
    left = CHAR * max(map(cells, labels), default=0) + 10
    right = CHAR * max(map(cells, values), default=0) + 10
    parts = []
    for i, (label, text, value) in enumerate(zip(labels, values, bars.values, strict=True)):
        y = i * ROW
        length = BAR * t.share(value, bars.limit)
        parts += [
            words(left - 10, y + 14, label, "end"),
            box(left, y + 4, BAR, ROW - 8, "track"),
            box(left, y + 4, length, ROW - 8, "bar", f"{label}: {text}"),
            words(left + BAR + right, y + 14, text, "end"),
        ]
    return Picture(left + BAR + right + 2, ROW * len(labels), "".join(parts))


def _columns(bars: Bars) -> Picture:
    """Many bars as thin columns from left to right, the limit as the full height."""
    height, width = 120.0, 720.0
    step = width / len(bars.values)
    parts = [box(0, 0, width, height, "track")]
    for i, (label, value) in enumerate(zip(bars.labels, bars.values, strict=True)):
        tall = height * t.share(value, bars.limit)
        gap = 1 if step >= 4 else 0
        title = f"{label}: {t.number(value, bars.unit)}"
        parts.append(box(i * step, height - tall, step - gap, tall, "bar", title))
    base = height + 16
    parts.append(words(0, base, bars.labels[0], "dim"))
    parts.append(words(width, base, bars.labels[-1], "dim end"))
    parts.append(words(width + 8, 12, t.number(bars.limit, bars.unit), "dim"))
    return Picture(width + 8 + CHAR * 14, base + 6, "".join(parts))


def _strip(strip: Strip) -> Picture:
    """Expected over actual, one box a slot, the wrong columns boxed in red."""
    rows = [(t.one_line(label), [t.one_line(c) for c in slots]) for label, slots in strip.rows]
    left = CHAR * max((cells(label) for label, _ in rows), default=0) + 12
    size = max((cells(c) for _, slots in rows for c in slots), default=1)
    cell = max(ROW + 4.0, CHAR * size + 8)
    length = max((len(slots) for _, slots in rows), default=0)
    parts = []
    for r, (label, slots) in enumerate(rows):
        y = r * (ROW + 4)
        parts.append(words(left - 12, y + 16, label, "dim end"))
        for i, text in enumerate(slots):
            x = left + i * cell
            kind = "bad" if i in strip.wrong else "cell"
            parts.append(box(x + 0.5, y + 0.5, cell - 2, ROW + 1, kind))
            parts.append(words(x + cell / 2 - 0.5, y + 15, text, "mid"))
    return Picture(left + length * cell + 1, len(rows) * (ROW + 4) + 2, "".join(parts))


def _table(table: Table) -> Picture:
    cols = [[t.one_line(c) for c in col] for col in zip(table.columns, *table.rows, strict=True)]
    parts, x = [], 0.0
    for col, name in zip(cols, table.columns, strict=True):
        width = CHAR * max(map(cells, col))
        for r, text in enumerate(col):
            kind = "dim" if r == 0 else ""
            if name in table.numeric:
                parts.append(words(x + width, r * ROW + 14, text, f"{kind} end"))
            else:
                parts.append(words(x, r * ROW + 14, text, kind))
        x += width + 16
    return Picture(max(0.0, x - 16) + 2, ROW * (len(table.rows) + 1), "".join(parts))
