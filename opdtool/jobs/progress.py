"""Progress of long work: on stderr, on a terminal, and only once it has taken a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

AFTER = 1.0
"""Seconds of work before anything is shown."""


@contextmanager
def progress(what: str, total: int, *, of_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A function to be called with each amount done, of ``total`` in all.

    Off a terminal it does nothing. On one, after :data:`AFTER` seconds, stderr shows the
    share done, the rate and the time left, and is cleared at the end. ``of_bytes`` shows
    amounts as bytes.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    bar = _Bar(what, total, of_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    def __init__(self, what: str, total: int, of_bytes: bool) -> None:
        self._what, self._total, self._of_bytes = what, total, of_bytes
        self._started = time.monotonic()
        self._done = 0
        self._shown: tuple[Progress, TaskID] | None = None

    def advance(self, amount: int) -> None:
        self._done += amount
        if self._shown is None:
            if time.monotonic() - self._started < AFTER:
                return
            self._shown = self._show()
        bar, task = self._shown
        bar.update(task, completed=self._done)

    def _show(self) -> tuple[Progress, TaskID]:
        from rich import progress as p
        from rich.console import Console

        rate: list[p.ProgressColumn] = (
            [p.DownloadColumn(binary_units=True), p.TransferSpeedColumn()]
            if self._of_bytes
            else [p.MofNCompleteColumn(), _rate_column()]
        )
        bar = p.Progress(
            p.TextColumn("{task.description}"),
            p.BarColumn(),
            p.TaskProgressColumn(),
            *rate,
            p.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=4,
        )
        bar.start()
        return bar, bar.add_task(self._what, total=self._total, completed=self._done)

    def close(self) -> None:
        if self._shown is not None:
            self._shown[0].stop()


def _rate_column() -> ProgressColumn:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f}/s" if task.speed else "")

    return Rate()
