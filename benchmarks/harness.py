"""What the benchmarks share: timing, child processes, one row of the table, the table.

A benchmark is a module of this package with ``rows(scale) -> list[Row]``, where the scale is
``small``, ``middle`` or ``large``. It times our way and the plain or ideal way in the same
run, so that the ratio holds on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

SCALES = ("small", "middle", "large")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    """What is measured; rows that differ only in size share it."""
    size: str
    """The size, as a person reads it."""
    ours: float
    plain: float | None
    """The plain or ideal way, in the same unit; None where there is none."""
    ratio: float | None
    """Ours and plain compared in the sense of the goal."""
    goal: str = ""
    reached: bool | None = None
    """None where nothing was promised."""
    unit: str = "s"
    work: float | None = None
    """Tokens or rows handled: rows of one name give the exponent at which cost grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished child process."""

    returncode: int
    wall: float
    """Seconds."""
    cpu: float
    """Seconds of user and system time."""
    peak_rss: int
    """Bytes."""
    output: str
    """stdout and stderr together."""


def best(call: Callable[[], object], *, repeats: int = 5, warmup: int = 1) -> float:
    """Seconds of the fastest of ``repeats`` calls after ``warmup`` others."""
    return best_each([call], repeats=repeats, warmup=warmup)[0]


def best_each(
    calls: Sequence[Callable[[], object]], *, repeats: int = 5, warmup: int = 1
) -> list[float]:
    """Seconds of the fastest call of each; they take turns, so that a busy spell hits all."""
    for call in calls:
        for _ in range(warmup):
            call()
    fastest = [float("inf")] * len(calls)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            for i, call in enumerate(calls):
                begin = time.perf_counter()
                call()
                fastest[i] = min(fastest[i], time.perf_counter() - begin)
    finally:
        if collecting:
            gc.enable()
    return fastest


_LAUNCHER = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
wall = time.perf_counter() - begin
with open(sys.argv[1], "w") as out:
    json.dump([os.waitstatus_to_exitcode(status), wall, usage.ru_utime + usage.ru_stime,
               usage.ru_maxrss], out)
"""


def run(command: Sequence[str | Path], *, env: dict[str, str] | None = None) -> Run:
    """The command run to its end, with its wall time and peak resident memory."""
    # A child's peak counts that of the process it was forked from, until it execs: a small
    # launcher stands between, so that our own memory is not taken for the command's.
    with TemporaryFile() as captured, NamedTemporaryFile() as figures:
        subprocess.run(
            [
                sys.executable,
                "-S",
                "-c",
                _LAUNCHER,
                figures.name,
                *[os.fspath(word) for word in command],
            ],
            stdout=captured,
            stderr=subprocess.STDOUT,
            env=os.environ | (env or {}),
            check=True,
        )
        returncode, wall, cpu, peak = json.loads(Path(figures.name).read_text())
        captured.seek(0)
        output = captured.read().decode(errors="replace")
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(returncode=returncode, wall=wall, cpu=cpu, peak_rss=peak * unit, output=output)


def exponents(rows: Iterable[Row]) -> dict[str, float]:
    """By name, the power of the work at which cost grew from the least size to the greatest."""
    grown: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.work and row.ours > 0:
            grown.setdefault(row.name, []).append((row.work, row.ours))
    out = {}
    for name, points in grown.items():
        (work, cost), (more_work, more_cost) = min(points), max(points)
        if more_work > work:
            out[name] = log(more_cost / cost) / log(more_work / work)
    return out


def show(rows: Sequence[Row]) -> None:
    """Print the rows as one table, whole names, numbers to the right."""
    from rich.console import Console
    from rich.table import Table

    powers = exponents(rows)
    table = Table(box=None, pad_edge=False)
    for title in ("what", "size"):
        table.add_column(title, no_wrap=True)
    for title in ("ours", "plain", "ratio", "goal", "grows as"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("reached", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            row.size,
            amount(row.ours, row.unit),
            "" if row.plain is None else amount(row.plain, row.unit),
            "" if row.ratio is None else f"{row.ratio:.5g}",
            row.goal,
            f"n^{powers[row.name]:.2f}" if row.name in powers else "",
            {True: "yes", False: "NO", None: ""}[row.reached],
        )
    console = Console()
    # Off a terminal nothing may be cut short.
    console = console if console.is_terminal else Console(width=400)
    console.print(table)
    promised = [row for row in rows if row.reached is not None]
    console.print(f"{sum(bool(row.reached) for row in promised)} of {len(promised)} goals reached")


def amount(value: float, unit: str) -> str:
    """A figure with its unit: 0.0123 s as 12.3 ms, bytes in MiB, counts with separators."""
    if unit == "s":
        for size, name in ((1.0, "s"), (1e-3, "ms")):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value / 1e-6:.3g} us"
    if unit == "B":
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:,.10g} {unit}".rstrip()


def as_json(rows: Sequence[Row]) -> str:
    """The rows as JSON, for keeping."""
    powers = exponents(rows)
    listed = [asdict(row) | {"exponent": powers.get(row.name)} for row in rows]
    return json.dumps({"schema": "opdtool.benchmarks/1", "rows": listed}, indent=1) + "\n"


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scale", choices=[*SCALES, "all"], default="all", help="sizes to run")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    return parser


def scales(chosen: str) -> tuple[str, ...]:
    """The scales behind the ``--scale`` option."""
    return SCALES if chosen == "all" else (chosen,)


def main(rows: Callable[[str], list[Row]], description: str) -> None:
    """Run one benchmark from its own command line."""
    options = arguments(description).parse_args()
    measured = [row for scale in scales(options.scale) for row in rows(scale)]
    if options.json:
        print(as_json(measured), end="")
    else:
        show(measured)
