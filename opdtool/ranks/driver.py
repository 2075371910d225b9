"""The driver's side of ranks in other processes: give tasks, gather results, notice who is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from opdtool.core.errors import InputError
from opdtool.ranks.board import Board, Greeting, Heart, Outcome
from opdtool.ranks.errors import RankError
from opdtool.ranks.member import POLL_SECONDS
from opdtool.ranks.perform import Performer, Task
from opdtool.ranks.topology import describe_rank

START_SECONDS = 60.0
"""How much longer than ``--timeout`` a rank may take to start: it imports torch first."""
_GRACE = {"input": 0.2, "internal": 0.2, "collective": 3.0}
"""After a rank reports such a failure, how long to wait for the one that may explain it."""
_GRAVITY = ("input", "internal", "collective")

Deaths = Callable[[], Mapping[int, str]]


class Driver:
    """Runs tasks on all ranks of a world of processes.

    ``deaths`` says which ranks are known to have died, and how. ``own`` does the work of rank
    0 where the driver's process is that rank too (under torchrun).
    """

    def __init__(
        self,
        board: Board,
        *,
        world_size: int,
        timeout: float,
        deaths: Deaths,
        own: Performer | None = None,
    ) -> None:
        self.world_size = world_size
        self.sizes = (1, 1)
        """TP and CP, by which errors name the ranks."""
        self.scratch: str | None = None
        """A directory that the ranks take away should this process be lost."""
        self.greetings: dict[int, Greeting] = {}
        self._board = board
        self._timeout = timeout
        self._deaths = deaths
        self._own = own
        self._tasks = 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._looked = 0.0
        self._worked = time.monotonic()
        self.ended = False
        self._heart = Heart(board, "driver")

    @property
    def others(self) -> range:
        """The ranks in other processes."""
        return range(0 if self._own is None else 1, self.world_size)

    def name(self, rank: int) -> str:
        """The rank as errors name it."""
        return describe_rank(rank, self.world_size, *self.sizes)

    def greet(self, own_gpu: bool) -> None:
        """Say where the driver is, for ranks that watch it."""
        self.greetings[0] = Greeting.mine(own_gpu)
        self._board.post("hello/0", self.greetings[0])

    def gather(self) -> None:
        """Wait until every rank has come.

        Raises:
            RankError: one died, or did not come in time.
        """
        limit = time.monotonic() + self._timeout + START_SECONDS
        missing = [rank for rank in self.others if rank not in self.greetings]
        while missing:
            for rank in list(missing):
                greeting = self._board.read(f"hello/{rank}")
                if greeting is not None:
                    self.greetings[rank] = greeting
                    self._beats[rank] = (-1, time.monotonic())
                    missing.remove(rank)
            self._raise_if_lost()
            if missing and time.monotonic() > limit:
                raise RankError(f"{self.name(missing[0])} did not start", rank=missing[0])
            time.sleep(POLL_SECONDS)

    def run(self, task: Task) -> list[Any]:
        """The task's result on every rank, in rank order.

        Raises:
            InputError: a rank refused its input.
            RankError: a rank failed or died, or stopped answering for ``timeout`` seconds.
        """
        number, self._tasks = self._tasks, self._tasks + 1
        self._board.post(f"task/{number}", task)
        if self._own is not None:
            self._own.start(task)
        outcomes: dict[int, Outcome] = {}
        failed_at = None
        while len(outcomes) < self.world_size:
            for rank in set(range(self.world_size)) - set(outcomes):
                outcome = self._outcome(number, rank)
                if outcome is not None:
                    outcomes[rank] = outcome
            failures = {r: o for r, o in outcomes.items() if o.kind != "ok"}
            # A dead rank explains the collectives that broke on the others, so it is looked
            # for first; its last words may still be on the board, so they are read before.
            self._raise_if_lost(finished=outcomes)
            if failures:
                failed_at = failed_at or time.monotonic()
                grace = min(_GRACE[o.kind] for o in failures.values())
                if time.monotonic() - failed_at > grace:
                    break
            if len(outcomes) < self.world_size:
                time.sleep(POLL_SECONDS)
        self._raise_failure(outcomes)
        return [outcomes[rank].value for rank in range(self.world_size)]

    def end(self, status: int) -> None:
        """Tell every rank to end with this status, and wait a moment until all have."""
        if self.ended:
            return
        self.ended = True
        self._heart.stop()
        self._board.post("end", status)
        if self._own is not None and status:
            self._own.cancel(5.0)
        limit = time.monotonic() + min(self._timeout, 5.0)
        while time.monotonic() < limit and not self._all_gone():
            time.sleep(POLL_SECONDS)
        if status:
            self._kill_stragglers()

    def _kill_stragglers(self) -> None:
        """A stopped process obeys nothing else, and whoever started it would wait for it."""
        here = Greeting.mine(False).host
        for rank in self.others:
            greeting = self.greetings.get(rank)
            if greeting is not None and greeting.host == here and not greeting.gone():
                with suppress(OSError):
                    os.kill(greeting.pid, signal.SIGKILL)

    def lost(self, patience: float) -> tuple[int, str] | None:
        """A rank that is gone or has not beaten for ``patience`` seconds, and how; or None."""
        for rank, cause in self._deaths().items():
            return rank, cause
        now = time.monotonic()
        for rank in self.others:
            greeting = self.greetings.get(rank)
            if greeting is None:
                continue
            if greeting.gone():
                return rank, self._how_it_died(rank)
            beat = self._board.count(f"beat/{rank}", 0)
            seen, since = self._beats[rank]
            if beat != seen:
                self._beats[rank] = (beat, now)
            elif now - since > patience:
                return rank, f"has not answered for {now - since:.0f} s"
        return None

    def _own_stuck(self, now: float) -> tuple[int, str] | None:
        """Whether the work of this process's own rank has stood still for the timeout."""
        if self._own is None or self._own.at_work():
            self._worked = now
        elif now - self._worked > self._timeout:
            return 0, f"has not answered for {now - self._worked:.0f} s"
        return None

    def _how_it_died(self, rank: int) -> str:
        """What its parent, where this is it, learns once the process's last thread has ended."""
        limit = time.monotonic() + (1.0 if self._own is None else 0.0)
        while time.monotonic() < limit:
            if rank in self._deaths():
                return self._deaths()[rank]
            time.sleep(POLL_SECONDS)
        return "has died"

    def _outcome(self, number: int, rank: int) -> Outcome | None:
        if rank == 0 and self._own is not None:
            return self._own.outcome()
        outcome: Outcome | None = self._board.take(f"done/{number}/{rank}")
        return outcome

    def _raise_if_lost(self, finished: Mapping[int, Outcome] = {}) -> None:
        now = time.monotonic()
        if now - self._looked < 0.1:
            return
        self._looked = now
        found = self.lost(self._timeout) or self._own_stuck(now)
        if found is not None:
            rank, cause = found
            outcome = finished.get(rank)
            if outcome is not None and outcome.kind != "ok":
                self._raise_failure({rank: outcome})
            raise RankError(f"{self.name(rank)} {cause}", rank=rank)

    def _raise_failure(self, outcomes: Mapping[int, Outcome]) -> None:
        failures = sorted(
            (_GRAVITY.index(outcome.kind), rank, outcome)
            for rank, outcome in outcomes.items()
            if outcome.kind != "ok"
        )
        if not failures:
            return
        _, rank, outcome = failures[0]
        if outcome.kind == "input":
            raise InputError(
                outcome.value if self.world_size == 1 else f"{self.name(rank)}: {outcome.value}"
            )
        message = f"{self.name(rank)} failed: {outcome.value}"
        late = [self.name(r) for r in range(self.world_size) if r not in outcomes]
        if outcome.kind == "collective" and late:
            message = f"{', '.join(late)} did not come in time: {outcome.value}"
        raise RankError(message, rank=rank, trace=outcome.trace)

    def _all_gone(self) -> bool:
        deaths = self._deaths()
        left = [r for r in self.others if r not in deaths and not self._known_gone(r)]
        return not left or (
            self._board.count("bye", 0) >= len(self.others) and not self._any_here(left)
        )

    def _known_gone(self, rank: int) -> bool:
        return rank in self.greetings and self.greetings[rank].gone()

    def _any_here(self, ranks: list[int]) -> bool:
        """Whether one of these ranks is on this machine, where one can see it go."""
        mine = Greeting.mine(False).host
        return any(r in self.greetings and self.greetings[r].host == mine for r in ranks)
