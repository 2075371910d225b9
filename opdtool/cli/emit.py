"""Print a report, write its files, and end with its exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from opdtool.findings import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a report goes: the options ``--format``, ``--report``, ``--exit-zero``, ``-q``."""

    format: str = "full"
    reports: Sequence[Path] = ()
    exit_zero: bool = False
    quiet: bool = False


def emit(report: Report, output: Output) -> None:
    """Print and write the report, then raise ``typer.Exit`` with its status."""
    from opdtool.report import render

    sys.stdout.write(render(report, output.format))
    raise typer.Exit(0 if report.passed or output.exit_zero else 1)
