"""Work beside the work: hashing and syncing in threads that never keep the process alive.

The threads of ``concurrent.futures`` are joined when the interpreter ends, so that an
interrupted run would first hash what nobody wants any more. These are daemons.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from typing import ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Workers:
    """A few daemon threads, started when there is something to do."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(
        self, work: Callable[_Args, _Result], *args: _Args.args, **options: _Args.kwargs
    ) -> Future[_Result]:
        """Have ``work`` done by a thread; the future has its result or its exception."""
        future: Future[_Result] = Future()
        self._jobs.put(partial(_fulfil, future, partial(work, *args, **options)))
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._serve, daemon=True, name="opdtool-hash")
            self._threads.append(thread)
            thread.start()
        return future

    def _serve(self) -> None:
        while True:
            self._jobs.get()()


def _fulfil(future: Future[_Result], work: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # it is raised where the result is asked for
        future.set_exception(error)


@cache
def workers() -> Workers:
    """The workers of this process."""
    return Workers(2)


os.register_at_fork(after_in_child=workers.cache_clear)  # threads do not survive a fork
