"""A rank in a process that is not the driver: it waits for tasks, does them, and ends as told."""

from __future__ import annotations

import pickle
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from opdtool.ranks.board import Board, Greeting, Heart, Outcome
from opdtool.ranks.perform import Performer, Seat, Task
from opdtool.ranks.stores import Store, under

POLL_SECONDS = 0.02
PATIENCE_SECONDS = 10.0
"""How long a rank that was asked to terminate waits for the driver's verdict."""

LOST = 3


class Member:
    """One waiting rank. ``lost`` says why the driver is gone, or None while it lives;
    ``speaks`` whether this rank tells the user so."""

    def __init__(
        self,
        seat: Seat,
        reach: Callable[[], Store],
        lost: Callable[[], str | None],
        *,
        speaks: bool,
    ) -> None:
        self._seat = seat
        self._lost = lost
        self._speaks = speaks
        self._scratch: str | None = None
        self._terminated: float | None = None
        self._board = Board(under("opdtool", reach()), seat.secret)
        self._performer = Performer(seat, reach)

    def terminate(self, *_: Any) -> None:
        """A handler for SIGTERM: go on listening for the driver's verdict, but not for long."""
        if self._terminated is None:
            self._terminated = time.monotonic()

    def serve(self) -> int:
        """Do tasks until the driver posts the final status; returns it."""
        board, rank = self._board, self._seat.rank
        number, running, checked = 0, False, 0.0
        try:
            Heart(board, str(rank), self._performer.at_work)
            board.post(f"hello/{rank}", Greeting.mine(self._seat.own_gpu))
            while True:
                status = board.read("end")
                if status is not None:
                    board.count("bye")
                    return int(status)
                if running:
                    outcome = self._performer.outcome()
                    if outcome is not None:
                        running = False
                        self._report(f"done/{number - 1}/{rank}", outcome)
                else:
                    task = board.read(f"task/{number}")
                    if task is not None:
                        number, running = number + 1, True
                        self._begin(task)
                now = time.monotonic()
                if now - checked > 0.2:
                    checked = now
                    cause = self._lost()
                    if cause is not None:
                        return self._mourn(cause)
                    if self._terminated and now - self._terminated > PATIENCE_SECONDS:
                        return 128 + signal.SIGTERM
                time.sleep(POLL_SECONDS)
        except torch.distributed.DistError as error:  # the store went away, and the driver with it
            time.sleep(0.3)
            return self._mourn(self._lost() or f"the driver is gone: {str(error).splitlines()[0]}")

    def _begin(self, task: Task) -> None:
        self._scratch = task.scratch
        self._performer.start(task)

    def _report(self, key: str, outcome: Outcome) -> None:
        try:
            self._board.post(key, outcome)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            self._board.post(key, Outcome("internal", f"the result cannot be sent: {error}"))

    def _mourn(self, cause: str) -> int:
        """The driver is gone: take its half-written output away, and say so once."""
        self._performer.cancel(2.0)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            time.sleep(0.2)
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._speaks:
            me = f"rank {self._seat.rank} of {self._seat.world_size}"
            with suppress(OSError):
                print(f"error: {cause}; {me} ends too", file=sys.stderr, flush=True)
        return LOST
