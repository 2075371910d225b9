"""Print a report, write its files, and end with its exit status."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import typer

from opdtool.core.errors import InputError
from opdtool.findings import Report

CHECKING = frozenset({"verify-pack", "verify-mask", "verify-d2t", "compare", "simulate", "check"})
"""Commands that exist to check: with nothing checked they are asked for nothing, and say so."""

DOCUMENTS = frozenset({"json", "jsonl", "junit", "markdown"})
"""Formats that something else reads: whole or they are nothing, so ``-q`` leaves them alone."""

_ENDINGS = (".json", ".xml", ".md", ".html", ".svg")
_collected: ContextVar[list[Report] | None] = ContextVar("collected", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a report goes: the options ``--format``, ``--report``, ``--exit-zero``, ``-q``.

    Made before the work starts, so that a report that cannot be written fails at once.

    Raises:
        InputError: a report path with an unknown ending, or that is a directory.
    """

    format: str = "full"
    reports: Sequence[Path] = ()
    exit_zero: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        for path in self.reports:
            if path.suffix not in _ENDINGS:
                raise InputError(
                    f"--report {path} ends in {path.suffix or 'nothing'}; the ending chooses the "
                    f"format and is one of {' '.join(_ENDINGS)}"
                )
            if path.is_dir():
                raise InputError(f"--report {path} is a directory; name a file in it")


@contextmanager
def collected() -> Iterator[list[Report]]:
    """Reports that are emitted meanwhile, gathered in a list and neither printed nor written."""
    found: list[Report] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def emit(report: Report, output: Output, *, status: int | None = None) -> None:
    """Write the report's files, print it, then raise ``typer.Exit`` with its status.

    The status follows from the findings, unless ``status`` gives another.

    Raises:
        InputError: a file cannot be written, or nothing was checked.
    """
    gathered = _collected.get()
    if gathered is not None:
        gathered.append(report)
    else:
        # Files first: they are whole even when nobody reads standard output to its end.
        for path in output.reports:
            _write_file(report, path)
        if output.format == "github":
            _write_step_summary(report)
        _print(report, output)
    if report.nothing_checked and (report.findings or report.command in CHECKING):
        raise InputError(f"{report.command}: nothing was checked{_why_nothing(report)}")
    if status is None:
        status = 0 if report.passed else 1
    raise typer.Exit(0 if status == 1 and output.exit_zero else status)


def _why_nothing(report: Report) -> str:
    reasons = list(dict.fromkeys(finding.message for finding in report.findings))
    more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
    return f": {reasons[0]}{more}" if reasons else ""


def _print(report: Report, output: Output) -> None:
    from opdtool.report import render

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    color = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    if not output.quiet or output.format in DOCUMENTS:
        say(render(report, output.format, width=width, color=color))
    elif not report.passed and output.format == "github":
        say(render(report, output.format))
    elif not report.passed:
        from opdtool.report.concise import concise

        say(concise(report, color=color, failures_alone=True))


def say(text: str) -> None:
    """Text on stdout; what its encoding lacks is escaped, never an error.

    Raises:
        InputError: it cannot be written, as on a full disk.
        BrokenPipeError: nobody reads on.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is buffered still would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(f"standard output cannot be written: {error.strerror or error}") from None


def _write_file(report: Report, path: Path) -> None:
    from opdtool.io.atomic import write_text_atomic
    from opdtool.report import ENDINGS, render

    # A report is a by-product of the run, and CI writes it anew every time.
    write_text_atomic(path, render(report, ENDINGS[path.suffix]), force=True)


def _write_step_summary(report: Report) -> None:
    """Add the report as Markdown to the summary page of a GitHub Actions step, where one is."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    from opdtool.report import render

    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(render(report, "markdown") + "\n")
    except OSError as error:
        print(f"warning: GITHUB_STEP_SUMMARY {path}: {error.strerror or error}", file=sys.stderr)
