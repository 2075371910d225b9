"""One self-contained HTML page: nothing is fetched, light and dark, pictures as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from opdtool.findings import Diagnosis, Finding, Report, Section, Table
from opdtool.report import text as t
from opdtool.report.paint import MARKS
from opdtool.report.pictures import STYLE as PICTURES
from opdtool.report.pictures import picture, svg

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#59636e;--page:#fff;--soft:#f6f8fa;
--line:#d1d9e0;--pass:#1a7f37;--fail:#d1242f;--warn:#9a6700;--skip:#59636e}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--page:#0d1117;
--soft:#151b23;--line:#3d444d;--pass:#3fb950;--fail:#f85149;--warn:#d29922;--skip:#9198a1}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:32px 0 8px}
h3{font-size:15px;margin:20px 0 6px}code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,
Consolas,"DejaVu Sans Mono",monospace;font-size:13px}
.dim{color:var(--dim)}.verdict{margin:16px 0;padding:12px 16px;border:1px solid var(--line);
border-left:6px solid var(--state);border-radius:6px;background:var(--soft);font-weight:600}
.pass{--state:var(--pass)}.fail{--state:var(--fail)}.warn{--state:var(--warn)}
.skip{--state:var(--skip)}.state{color:var(--state);font-weight:600;white-space:nowrap}
.wide{overflow-x:auto}table{border-collapse:collapse}
th,td{padding:5px 12px 5px 0;text-align:left;vertical-align:top;border-bottom:1px solid
var(--line)}th{color:var(--dim);font-weight:500}td.id{white-space:nowrap}
td.tensor{min-width:16em;overflow-wrap:anywhere}td.message{min-width:24em;white-space:pre-line}
th.n,td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.card{margin:8px 0;padding:12px 16px;border:1px solid var(--line);border-radius:6px}
.card p{margin:6px 0 0;white-space:pre-line}.chips span{display:inline-block;margin:0 8px 4px 0;
padding:1px 10px;border:1px solid var(--line);border-radius:12px;font-size:13px}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html(report: Report) -> str:
    """The report as an HTML document that needs nothing beside itself."""
    title = escape(t.one_line(f"opdtool {report.command}"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n'
        f"<style>{STYLE}{PICTURES}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        + "\n".join(_body(report))
        + "\n</main>\n</body>\n</html>\n"
    )


def _body(report: Report) -> Iterator[str]:
    if report.inputs:
        names = ", ".join(f"<code>{_text(path)}</code>" for path in report.inputs)
        yield f'<div class="dim">{names}</div>'
    yield f'<div id="verdict" class="verdict {t.outcome(report)}">{_text(t.verdict(report))}</div>'
    if report.geometry:
        chips = "".join(
            f"<span>{_text(key)} <b>{_text(t.value(item))}</b></span>"
            for key, item in report.geometry.items()
        )
        yield f'<div class="chips">{chips}</div>'
    if report.diagnosis:
        yield "<h2>Diagnosis</h2>"
        yield from map(_diagnosis, report.diagnosis)
    if report.findings:
        yield "<h2>Checks</h2>"
        yield _checks(report.findings)
    if any(finding.first for finding in report.findings):
        yield "<h2>Where</h2>"
        yield from (_places(finding) for finding in report.findings if finding.first)
    for section in report.sections:
        yield _section(section)
    if report.notes:
        yield "<h2>Notes</h2>"
        yield from (f"<p>{_text(note)}</p>" for note in report.notes)


def _diagnosis(entry: Diagnosis) -> str:
    step = f"{_text(entry.step)}: " if entry.step else ""
    return (
        f'<div class="card diagnosis">{step}<code class="state fail">'
        f"{_text(t.fault_names(entry))}</code> "
        f'<span class="dim">({_text(t.match_text(entry))})</span>'
        f"<p>{_block(entry.message)}</p><p><b>Fix</b> {_block(entry.fix)}</p></div>"
    )


def _checks(findings: Sequence[Finding]) -> str:
    steps = any(finding.step for finding in findings)
    names = ["step"] * steps + ["", "code", "check", "tensor", "wrong", "message"]
    rows = []
    for f in findings:
        cells = [f'<td class="id">{_text(f.step or "")}</td>'] * steps
        cells += [
            f'<td class="state {f.status}">{MARKS[f.status]} {f.status}</td>',
            f'<td class="id"><code>{_text(f.code)}</code></td>',
            f'<td class="id">{_text(f.name)}</td>',
            f'<td class="tensor"><code>{_text(f.tensor or "")}</code></td>',
            f'<td class="n">{t.wrong_of(f)}</td>',
            f'<td class="message">{_block(f.message)}</td>',
        ]
        rows.append("".join(cells))
    head = "".join(f"<th{' class=n' if name == 'wrong' else ''}>{name}</th>" for name in names)
    return _table(head, rows, "checks")


def _places(finding: Finding) -> str:
    names = t.columns(finding.first)
    # Texts, such as the token ids around a place, read from the left; all else are numbers.
    kinds = [
        "mono" if any(isinstance(place.get(name), str) for place in finding.first) else "n mono"
        for name in names
    ]
    columns = list(zip(names, kinds, strict=True))
    head = "".join(f'<th class="{kind}">{_text(name)}</th>' for name, kind in columns)
    rows = [
        "".join(f'<td class="{kind}">{_text(t.value(place.get(n)))}</td>' for n, kind in columns)
        for place in finding.first
    ]
    more = t.more_places(finding)
    rest = f'<div class="dim">and {t.count(more)} more</div>' if more else ""
    return f"<h3>{_text(t.label(finding))}</h3>{_table(head, rows, 'places')}{rest}"


def _section(section: Section) -> str:
    title = f"<h2>{_text(section.title)}</h2>"
    if not isinstance(section, Table):
        return f'{title}<div class="wide">{svg(picture(section), section.title)}</div>'
    kinds = [" class=n" if name in section.numeric else "" for name in section.columns]
    columns = zip(section.columns, kinds, strict=True)
    head = "".join(f"<th{kind}>{_text(name)}</th>" for name, kind in columns)
    rows = [
        "".join(f"<td{kind}>{_text(c)}</td>" for c, kind in zip(row, kinds, strict=True))
        for row in section.rows
    ]
    return title + _table(head, rows, "section")


def _table(head: str, rows: Sequence[str], kind: str) -> str:
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _text(text: str) -> str:
    return escape(t.one_line(text))


def _block(text: str) -> str:
    return escape(t.clean(text, keep="\n"))
