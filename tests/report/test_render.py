"""Every format, pinned from one failing and one passing report.

After a change that is meant: ``OPDTOOL_UPDATE_GOLDEN=1 pytest tests/report`` and read the diff.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import jsonschema  # type: ignore[import-untyped]
import pytest

from opdtool.findings import Bars, Finding, Report
from opdtool.report import ENDINGS, FORMATS, render, schema
from opdtool.report.concise import concise
from opdtool.report.text import inert
from tests.report.samples import EVIL, FAILING, HOSTILE, PASSING

GOLDEN = Path(__file__).parent / "golden"
ALL = tuple(dict.fromkeys([*FORMATS, *ENDINGS.values()]))
REPORTS = {"failing": FAILING, "passing": PASSING}


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("name", REPORTS)
def test_every_format_prints_what_is_pinned(name: str, format: str) -> None:
    text = render(REPORTS[name], format)
    path = GOLDEN / f"{name}.{format}.txt"
    if os.environ.get("OPDTOOL_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text.endswith("\n")
    assert text == path.read_text(encoding="utf-8")


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="yaml"):
        render(PASSING, "yaml")


@pytest.mark.parametrize("format", ["full", "concise", "github", "markdown", "html", "svg"])
def test_formats_for_people_name_every_diagnosed_fault(format: str) -> None:
    text = render(FAILING, format)
    names = [name for entry in FAILING.diagnosis for name in entry.faults or (entry.fault,)]
    assert len(names) == 3
    assert all(name in text for name in names)


@pytest.mark.parametrize("width", [None, 20, 40, 60, 80, 100, 200])
def test_full_never_cuts_a_name_at_any_width(width: int | None) -> None:
    text = render(FAILING, "full", width=width)
    names = [f.tensor for f in FAILING.findings if f.tensor] + [f.name for f in FAILING.findings]
    assert len(names) == 7
    assert all(name in text for name in names)
    assert "…" not in text


def test_full_folds_messages_to_the_width_of_a_terminal() -> None:
    long = Finding(code="OPD101", name="x", status="fail", message="word " * 60)
    text = render(Report(command="verify-pack", findings=(long,)), "full", width=80)
    assert text.count("word") == 60
    assert max(map(len, text.splitlines())) <= 80


def test_full_folds_long_messages_off_a_terminal_too_and_breaks_no_name() -> None:
    name = "a_name_of_more_than_a_hundred_and_twenty_columns-with-hyphens/" * 3
    message = f"{name} " + "mask-not-shifted " * 20
    long = Finding(code="OPD101", name="x", status="fail", message=message)
    rows = render(Report(command="verify-pack", findings=(long,)), "full").splitlines()
    assert sum(row.count("mask-not-shifted") for row in rows) == 20
    assert [row for row in rows if len(row) > 120] == [row for row in rows if name in row]
    assert len([row for row in rows if name in row]) == 1


def test_full_has_one_line_a_check_off_a_terminal_and_the_verdict_last() -> None:
    rows = render(FAILING, "full").splitlines()
    for finding in FAILING.findings:
        assert len([row for row in rows if row[3:].startswith(finding.code)]) == 1
    assert rows[-1].startswith("FAILED verify-mask: 1 check failed, 1 passed, 1 warned, 1 skipped")


def test_full_aligns_counts_on_the_right() -> None:
    findings = tuple(
        Finding(code="OPD301", name="n", status="fail", message="m", mismatches=n, total=5000)
        for n in (7, 1234)
    )
    rows = render(Report(command="x", findings=findings), "full").splitlines()[2:4]
    ends = [row.index("5,000") + 5 for row in rows]
    assert ends[0] == ends[1]
    assert "    7 / 5,000" in rows[0]


def test_full_marks_the_wrong_columns_of_a_strip() -> None:
    rows = render(FAILING, "full").splitlines()
    actual = next(row for row in rows if row.lstrip().startswith("actual  "))
    marks = rows[rows.index(actual) + 1]
    # Columns 2 and 5 are wrong; a cell ends where the column of the row above it ends.
    assert [i for i, c in enumerate(marks) if c == "^"] == [19, 28]
    assert (actual[19], actual[28]) == ("0", "1")


def test_colour_is_added_only_when_asked_for_and_changes_no_character() -> None:
    for format in ("full", "concise"):
        plain, coloured = render(FAILING, format), render(FAILING, format, color=True)
        assert "\x1b" not in plain
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_concise_has_a_line_for_each_finding_that_did_not_pass_and_no_other() -> None:
    rows = render(FAILING, "concise").splitlines()
    assert [row.split()[0] for row in rows] == [
        "fail", "warn", "skip", "diagnosis", "diagnosis", "FAILED",
    ]  # fmt: skip
    rows = concise(FAILING, failures_alone=True).splitlines()
    assert [row.split()[0] for row in rows] == ["fail", "diagnosis", "diagnosis", "FAILED"]
    assert render(PASSING, "concise") == "PASSED verify-mask: 2 checks passed\n"


@pytest.mark.parametrize("report", [FAILING, PASSING, HOSTILE])
def test_json_satisfies_its_schema_and_has_sorted_keys(report: Report) -> None:
    whole = json.loads(render(report, "json"))
    jsonschema.Draft202012Validator(schema()).validate(whole)
    assert list(whole) == sorted(whole)
    assert whole["schema"] == "opdtool.report/1"
    assert whole["passed"] is report.passed


def test_the_schema_is_itself_valid_and_refuses_what_is_no_report() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    whole = json.loads(render(FAILING, "json"))
    bad = [whole | {"extra": 1}, whole | {"passed": "no"}, {k: whole[k] for k in ("schema",)}]
    bad.append(whole | {"diagnosis": [{"fault": "x", "match": "likely", "message": "", "fix": ""}]})
    for wrong in bad:
        assert not jsonschema.Draft202012Validator(schema()).is_valid(wrong)


def test_json_writes_numbers_that_are_not_finite_as_strings() -> None:
    whole = json.loads(render(FAILING, "json"), parse_constant=pytest.fail)
    assert whole["checks"][1]["first"][1]["actual"] == "nan"
    assert whole["stats"]["worst"] == "inf"


def test_jsonl_is_one_value_a_line_with_the_summary_last() -> None:
    rows = [json.loads(line) for line in render(FAILING, "jsonl").splitlines()]
    assert [row["type"] for row in rows] == ["check"] * 4 + ["diagnosis"] * 2 + ["summary"]
    whole = json.loads(render(FAILING, "json"))
    assert [{k: v for k, v in row.items() if k != "type"} for row in rows[:4]] == whole["checks"]
    assert rows[-1]["summary"] == whole["summary"]


@pytest.mark.parametrize("report", [FAILING, PASSING, HOSTILE])
def test_junit_is_valid_xml_with_one_case_a_check(report: Report) -> None:
    suite = ElementTree.fromstring(render(report, "junit")).find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    assert len(cases) == len(report.findings) == int(suite.attrib["tests"])
    for case, finding in zip(cases, report.findings, strict=True):
        assert finding.code in case.attrib["name"]
        assert (case.find("failure") is not None) == (finding.status == "fail")
        assert (case.find("skipped") is not None) == (finding.status == "skip")
    assert int(suite.attrib["failures"]) == report.summary["failed"]


@pytest.mark.parametrize("format", ALL)
def test_what_is_counted_without_an_example_has_no_others(format: str) -> None:
    finding = Finding(
        code="OPD301", name="mask-values", status="fail", message="wrong", mismatches=32, total=32
    )
    text = render(Report(command="verify-mask", geometry={}, findings=(finding,)), format)
    assert "32" in text or format == "svg"
    assert not re.search(r"more\b", text)


def test_junit_names_the_fault_in_the_failure() -> None:
    failure = ElementTree.fromstring(render(FAILING, "junit")).find(".//failure")
    assert failure is not None
    assert "mask-not-shifted (exact)" in (failure.text or "")


def test_github_escapes_what_would_end_an_annotation() -> None:
    rows = render(HOSTILE, "github").splitlines()
    kinds = [row.split(" ")[0] for row in rows]
    assert kinds == ["::error", "::warning", "::notice", "FAILED"]
    title = re.fullmatch(r"::error title=([^:,]*)::.*", rows[0])
    assert title is not None
    assert "%250A" in rows[0]


@pytest.mark.parametrize("format", ALL)
def test_no_control_code_of_a_hostile_name_reaches_the_output(format: str) -> None:
    assert "\x1b" in EVIL
    text = render(HOSTILE, format)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "script" in text
    text.encode("utf-8")


@pytest.mark.parametrize("format", ["html", "svg", "markdown"])
def test_markup_in_a_name_is_escaped(format: str) -> None:
    rows = render(HOSTILE, format).splitlines()
    if format == "markdown":  # an indented block shows everything as it is
        rows = [row for row in rows if not row.startswith("    ")]
    assert len(rows) > 10
    assert "<script" not in "\n".join(rows)


def test_a_markdown_table_keeps_its_columns_whatever_the_names_hold() -> None:
    rows = [row for row in render(HOSTILE, "markdown").splitlines() if row.startswith("| ")]
    bars = [len(re.findall(r"(?<!\\)\|", row)) for row in rows[:4]]
    assert bars == [8, 8, 8, 8]


def test_svg_and_html_are_self_contained_and_the_svg_is_xml() -> None:
    for report in (FAILING, PASSING, HOSTILE):
        root = ElementTree.fromstring(render(report, "svg"))
        assert root.tag.endswith("svg")
        for text in (render(report, "html"), render(report, "svg")):
            assert not re.search(r"""(src|href)=(?!"data:)""", text)
            assert "url(" not in text
            assert "@import" not in text


def test_a_picture_of_many_checks_shows_each_failure_and_counts_the_rest() -> None:
    held = [
        Finding(code="OPD301", name=f"held-{i}", status="pass", message="m") for i in range(200)
    ]
    failed = Finding(code="OPD302", name="failed", status="fail", message="m")
    text = render(Report(command="check", findings=(*held, failed)), "svg")
    assert "200 checks passed" in text
    assert "OPD302 failed" in text
    assert "held-" not in text
    assert "held-7" in render(Report(command="check", findings=(*held, failed)), "html")


def test_many_bars_are_drawn_as_columns_without_losing_one() -> None:
    labels = tuple(f"pack-{i:05}" for i in range(500))
    bars = Bars(title="u", labels=labels, values=(50.0,) * 500, limit=100.0)
    text = render(Report(command="pack", sections=(bars,)), "html")
    assert all(label in text for label in labels)
    assert text.count('class="bar"') == 500


def test_a_report_without_findings_is_done_and_one_of_skips_checked_nothing() -> None:
    assert render(Report(command="pack"), "concise") == "DONE pack\n"
    skip = Finding(code="OPD301", name="n", status="skip", message="no mask")
    text = render(Report(command="verify-mask", findings=(skip,)), "concise")
    assert text.splitlines()[-1] == "NOTHING CHECKED verify-mask: 1 check skipped"


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ("pass", "PASSED x: 1 check passed"),
        ("pass pass warn", "PASSED x: 2 checks passed, 1 warned"),
        ("warn", "PASSED x: 1 check warned"),
        ("warn skip skip", "PASSED x: 1 check warned, 2 skipped"),
        ("skip skip", "NOTHING CHECKED x: 2 checks skipped"),
        ("fail", "FAILED x: 1 check failed"),
        ("fail fail pass warn skip", "FAILED x: 2 checks failed, 1 passed, 1 warned, 1 skipped"),
        ("pass " * 1200, "PASSED x: 1,200 checks passed"),
    ],
)
def test_the_verdict_counts_every_check_once_under_what_became_of_it(
    statuses: str, said: str
) -> None:
    findings = tuple(
        Finding(code="OPD301", name="n", status=status, message="m")  # type: ignore[arg-type]
        for status in statuses.split()
    )
    assert findings
    assert render(Report(command="x", findings=findings), "concise").splitlines()[-1] == said


def test_junit_gives_no_times() -> None:
    # An invented 0 would be averaged by what reads it; a true one would differ on every run.
    suite = ElementTree.fromstring(render(FAILING, "junit"))
    elements = list(suite.iter())
    assert len(elements) > 5
    assert not [element.tag for element in elements if "time" in element.attrib]


def test_no_line_is_a_command_of_a_runner() -> None:
    cases = {
        "::error::x": r"\x3a:error::x",
        "a\n  ::stop-commands::t": "a\n  " + r"\x3a:stop-commands::t",
        "\x1b[31m::x": "\x1b[31m" + r"\x3a:x",
        "a ##[error]b": r"a \x23#[error]b",
        "std::vector, ## [x]": "std::vector, ## [x]",
        ": ": ": ",
    }
    assert {text: inert(text) for text in cases} == cases
