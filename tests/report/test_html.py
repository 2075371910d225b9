"""The HTML report in a real browser: it says what it must, and the browser has no complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from opdtool.findings import Report
from opdtool.report import render
from tests.report.samples import FAILING, HOSTILE, PASSING

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no headless browser: install Debian's chromium to run this"
)


def browse(page: Path) -> tuple[str, str]:
    """(the document after the browser read it, what the browser logged)."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--log-level=0", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def test_the_browser_reports_a_console_error_where_there_is_one(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<p>x</p><script>console.error('seen')</script>", encoding="utf-8")
    assert "CONSOLE" in browse(page)[1]


@pytest.mark.parametrize(
    ("report", "state", "diagnosed", "charts"),
    [(FAILING, "fail", 2, 2), (PASSING, "pass", 0, 0), (HOSTILE, "fail", 1, 2)],
)
def test_the_page_shows_verdict_checks_diagnosis_and_charts(
    tmp_path: Path, report: Report, state: str, diagnosed: int, charts: int
) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(report, "html"), encoding="utf-8")
    dom, log = browse(page)
    assert "CONSOLE" not in log
    assert f'id="verdict" class="verdict {state}"' in dom
    checks = re.search(r'<table class="checks">.*?<tbody>(.*?)</tbody>', dom, re.S)
    assert checks is not None
    assert checks[1].count("<tr>") == len(report.findings)
    assert dom.count("card diagnosis") == diagnosed
    assert dom.count("<svg") == charts
    assert "<script" not in dom
    assert dom.count('class="bad"') == 3 * 2 * (report is FAILING) + (report is HOSTILE)
