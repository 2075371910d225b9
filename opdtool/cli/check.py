"""``opdtool check``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from opdtool.cli.options import (
    ExitZeroOption,
    Format,
    FormatOption,
    QuietOption,
    ReportOption,
)
from opdtool.findings import Finding, Report, Table

if TYPE_CHECKING:
    from opdtool.cli.suite import Step

WORST = (3, 2, 1, 0)
"""Exit statuses, the worst first; one of a signal, such as 130, is worse than all of them."""


def command(
    suite: Annotated[Path, typer.Argument(metavar="SUITE.toml", help="The steps to run.")],
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run the steps of a suite file; one report, and the worst exit status of all steps.

    A [[step]] has a command, its positional arguments as inputs, and each option as a key.
    [defaults] are for all steps, [matrix] runs them for every combination of its values.
    Paths are relative to the file.
    """
    from opdtool.cli.emit import Output, emit
    from opdtool.cli.suite import read_suite

    output = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    outcomes = list(run(read_suite(suite), suite.absolute().parent))
    status = worst([outcome.status for outcome in outcomes])
    emit(merged(outcomes, suite), output, status=status)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended. ``status`` None: it was not run. ``reports`` is what it emitted."""

    step: Step
    status: int | None
    reports: tuple[Report, ...] = ()
    said: str = ""


def worst(statuses: list[int | None]) -> int:
    """The worst of the steps' exit statuses; one that is none of ours counts as internal."""
    known = [status for status in statuses if status is not None]
    signals = [status for status in known if status >= 128]
    if signals:
        return signals[-1]
    return min((status if status in WORST else 3 for status in known), key=WORST.index)


def run(steps: list[Step], folder: Path) -> Iterator[Outcome]:
    """Run the steps in ``folder``, one after the other, and say how each ended.

    After a step that fails, and is not to be continued after, the others are not run.
    """
    stopped = False
    for step in steps:
        if stopped:
            yield Outcome(step, None)
            continue
        outcome = _run_step(step, folder)
        yield outcome
        status = outcome.status or 0
        # Ended by a signal, the whole suite is meant.
        stopped = status >= 128 or (status != 0 and not step.continue_on_failure)


def _run_step(step: Step, folder: Path) -> Outcome:
    """One step as if it had been typed in ``folder``, in this process."""
    from opdtool.cli import main
    from opdtool.cli.defaults import active
    from opdtool.cli.emit import collected
    from opdtool.cli.suite import expand
    from opdtool.core.errors import InputError

    config = active.get()
    # The suite's own file of defaults, not the one nearest to the suite's folder.
    root = ["--isolated"] if config is None else ["--config", str(config.path)]
    said = io.StringIO()
    try:
        argv = expand(step, folder)
    except InputError as error:
        print(f"error: {step.name}: {error}", file=sys.stderr)
        return Outcome(step, 2, said=str(error))
    tee = _Tee(said, sys.stderr)
    # What a step prints beside its report is not part of the suite's: it goes to stderr.
    with ExitStack() as stack:
        reports = stack.enter_context(collected())
        stack.enter_context(_inside(folder))
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(redirect_stderr(cast(TextIO, tee)))
        status = main.run([*root, *argv])
    active.set(config)
    return Outcome(step, status, tuple(reports), said.getvalue().strip())


class _Tee:
    """A stream that passes on what is written, and keeps it."""

    def __init__(self, kept: io.StringIO, stream: TextIO) -> None:
        self._kept, self._stream = kept, stream

    def write(self, text: str) -> int:
        self._kept.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def merged(outcomes: list[Outcome], suite: Path) -> Report:
    """All steps' reports as one, each finding and diagnosis marked with its step."""
    findings = [f for outcome in outcomes for f in _findings(outcome)]
    ran = [(outcome, report) for outcome in outcomes for report in outcome.reports]
    return Report(
        command="check",
        geometry={"steps": len(outcomes)},
        findings=tuple(findings),
        diagnosis=tuple(
            replace(entry, step=outcome.step.name)
            for outcome, report in ran
            for entry in report.diagnosis
        ),
        stats={"steps": [_stats(outcome) for outcome in outcomes]},
        sections=(
            *(
                replace(section, title=f"{outcome.step.name}: {section.title}")
                for outcome, report in ran
                for section in report.sections
            ),
            _table(outcomes),
        ),
        notes=tuple(
            f"{outcome.step.name}: {note}" for outcome, report in ran for note in report.notes
        ),
        inputs=(str(suite),),
    )


def _findings(outcome: Outcome) -> Iterator[Finding]:
    """A step's findings; ``step-completed`` for one that has none, or did not run to its end."""
    from opdtool.checks.registry import check_name

    name = outcome.step.name
    findings = [replace(f, step=name) for report in outcome.reports for f in report.findings]
    yield from findings
    code = "OPD990"
    if outcome.status is None:
        yield Finding(
            code=code,
            name=check_name(code),
            status="skip",
            message="not run: an earlier step failed",
            step=name,
        )
    elif outcome.status not in (0, 1):
        words = " ".join(_errors(outcome.said))
        yield Finding(
            code=code,
            name=check_name(code),
            status="fail",
            message=f"exit status {outcome.status}" + (f": {words}" if words else ""),
            step=name,
        )
    elif not findings:
        message = f"opdtool {outcome.step.command} ran to its end"
        yield Finding(code=code, name=check_name(code), status="pass", message=message, step=name)


def _errors(said: str) -> list[str]:
    """What a step said of its end, without its progress and warnings."""
    rows = said.splitlines()
    starts = [i for i, row in enumerate(rows) if row.startswith(("error: ", "internal error: "))]
    return [row.removeprefix("error: ") for row in rows[starts[-1] :]] if starts else rows[-1:]


def _stats(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.step.name,
        "command": outcome.step.command,
        "status": outcome.status,
        "reports": [
            {
                "geometry": dict(report.geometry),
                "stats": dict(report.stats),
                "summary": report.summary,
            }
            for report in outcome.reports
        ],
    }


def _table(outcomes: list[Outcome]) -> Table:
    words = {0: "passed", 1: "failed", 2: "error", 3: "internal error", 130: "interrupted"}
    rows = []
    for outcome in outcomes:
        status = "-" if outcome.status is None else str(outcome.status)
        word = "not run" if outcome.status is None else words.get(outcome.status, "error")
        checks = sum(len(report.findings) for report in outcome.reports)
        rows.append((outcome.step.name, outcome.step.command, f"{checks:,}", status, word))
    return Table(
        title="Steps",
        columns=("step", "command", "checks", "exit", "outcome"),
        rows=tuple(rows),
        numeric=frozenset({"checks", "exit"}),
    )
