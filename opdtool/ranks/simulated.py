"""All ranks in one process: threads that take turns, and collectives in memory.

One rank runs at a time. It runs until it enters a collective or ends; then the next rank that
can run has its turn. When every rank waits in the collective the messages are handed over and
rank 0 goes on. So a run is deterministic down to the order of side effects, computing threads
are not oversubscribed, and a collective that not every rank enters is seen at once instead of
hanging.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.group import check_messages, check_widths
from opdtool.core.words import plural
from opdtool.ranks.errors import RankError, RunEnded

T = TypeVar("T")

DEFAULT_TIMEOUT = 1800.0
"""Seconds that one turn of one rank may take: torch.distributed's own default for gloo."""


@dataclass(slots=True)
class _Post:
    """What one rank brings to a collective."""

    name: str
    members: tuple[int, ...]
    tensors: list[Tensor]
    widths: Sequence[int] | None = None


@dataclass(slots=True)
class _World:
    """What the ranks of one run share. Every field is guarded by ``turn``."""

    size: int
    timeout: float
    turn: threading.Condition = field(default_factory=threading.Condition)
    running: int = 0
    posts: dict[int, _Post] = field(default_factory=dict)
    inbox: dict[int, list[Tensor]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failure: tuple[int | None, BaseException] | None = None

    def exchange(self, rank: int, post: _Post) -> list[Tensor]:
        """Bring ``post``, let the others run, and return what they brought for this rank."""
        with self.turn:
            self.posts[rank] = post
            self._pass_on()
            self.wait_for_turn(rank)
            return self.inbox.pop(rank)

    def wait_for_turn(self, rank: int) -> None:
        """Sleep until it is this rank's turn. Raises :class:`RunEnded` when the run is over.

        The main thread watches the clock, so that waiting here has an end.
        """
        while self.failure is None and self.running != rank:
            self.turn.wait()
        if self.failure is not None:
            raise RunEnded

    def finish(self, rank: int) -> None:
        with self.turn:
            self.done.add(rank)
            self._pass_on()

    def fail(self, rank: int | None, error: BaseException) -> None:
        with self.turn:
            if self.failure is None:
                self.failure = (rank, error)
            self.turn.notify_all()

    def _pass_on(self) -> None:
        """Give the turn to a rank that can run; when none can, hand the messages over."""
        ready = [r for r in range(self.size) if r not in self.posts and r not in self.done]
        if not ready and self.posts:
            try:
                ready = self._deliver()
            except InputError as error:
                self.failure = (None, error)
        self.running = ready[0] if ready else -1
        self.turn.notify_all()

    def _deliver(self) -> list[int]:
        """Hand over the messages of every group whose members all wait; returns the members."""
        groups = {post.members for post in self.posts.values()}
        complete = [
            members
            for members in sorted(groups)
            if all(r in self.posts and self.posts[r].members == members for r in members)
        ]
        if not complete:
            self._refuse_deadlock()
        for members in complete:
            self.inbox |= _exchange(members, [self.posts.pop(r) for r in members])
        return sorted(r for members in complete for r in members)

    def _refuse_deadlock(self) -> None:
        """Every rank waits or has ended, and no group is whole: say who is missing."""
        rank, post = min(self.posts.items())
        for other in post.members:
            if other in self.done:
                waiting = [r for r in post.members if r in self.posts]
                raise InputError(
                    f"rank {other} of {self.size} ended without entering {post.name}, in which "
                    f"{_ranks(waiting)} wait"
                )
        others = {r: p for r, p in self.posts.items() if p.members != post.members}
        other = min(others)
        raise InputError(
            f"the ranks disagree: rank {rank} entered {post.name} with {_ranks(post.members)}, "
            f"rank {other} {others[other].name} with {_ranks(others[other].members)}"
        )


def _exchange(members: tuple[int, ...], posts: list[_Post]) -> dict[int, list[Tensor]]:
    """What each member receives, when ``posts`` are what the members bring."""
    first = posts[0]
    for rank, post in zip(members, posts, strict=True):
        if post.name != first.name:
            raise InputError(
                f"the ranks disagree: rank {members[0]} entered {first.name}, "
                f"rank {rank} {post.name}"
            )
        _check_agreement(members[0], first, rank, post)
    if first.name == "all_gather":
        return {to: [post.tensors[0].clone() for post in posts] for to in members}
    inbox = {
        to: [post.tensors[place].clone() for post in posts] for place, to in enumerate(members)
    }
    for to, post in zip(members, posts, strict=True):
        check_widths([t.shape[-1] for t in inbox[to]], post.widths, to)
    return inbox


def _ranks(ranks: Any) -> str:
    names = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _check_agreement(leader: int, first: _Post, rank: int, post: _Post) -> None:
    """Hold the dtype and the dimensions that must agree equal to the first member's."""
    end = None if post.name == "all_gather" else -1
    mine, others = post.tensors[0], first.tensors[0]
    if mine.dtype == others.dtype and mine.shape[:end] == others.shape[:end]:
        return
    raise InputError(
        f"the ranks disagree in {post.name}: rank {leader} brings {others.dtype} "
        f"{list(others.shape)}, rank {rank} {mine.dtype} {list(mine.shape)}"
    )


class SimulatedGroup:
    """One rank's view of a simulated group; see :func:`run_simulated`."""

    def __init__(self, world: _World, world_rank: int, members: tuple[int, ...]) -> None:
        self._world = world
        self._world_rank = world_rank
        self._members = members

    @property
    def rank(self) -> int:
        return self._members.index(self._world_rank)

    @property
    def size(self) -> int:
        return len(self._members)

    def among(self, ranks: Sequence[int]) -> SimulatedGroup:
        """The group of these ranks of the whole run, in this order; this rank is one of them."""
        return SimulatedGroup(self._world, self._world_rank, tuple(ranks))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._exchange(_Post("all_gather", self._members, [tensor.detach()]))

    def all_to_all(
        self, tensors: Sequence[Tensor], widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        check_messages(tensors, self.size, self.rank, widths)
        sent = [tensor.detach() for tensor in tensors]
        return self._exchange(_Post("all_to_all", self._members, sent, widths))

    def _exchange(self, post: _Post) -> list[Tensor]:
        return self._world.exchange(self._world_rank, post)


def run_simulated(
    size: int,
    fn: Callable[[SimulatedGroup], T],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    name: Callable[[int], str] | None = None,
) -> list[T]:
    """What ``fn(group)`` returns on each of ``size`` simulated ranks, in rank order.

    ``fn`` is rank-local code. It may call backward: a rank's backward pass runs in its own
    thread, also on CUDA. Gradient mode is the caller's. ``name`` says what errors call a rank.

    Raises:
        InputError: a rank refused its input (named in front of the message), or the ranks
            brought different collectives, shapes or dtypes.
        RankError: a rank failed in any other way, or one turn took longer than ``timeout``
            seconds.
    """
    if size < 1:
        raise InputError(f"a group of {plural(size, 'rank')} cannot be simulated; at least 1")
    world = _World(size, timeout)
    results: dict[int, T] = {}
    grad_mode = torch.is_grad_enabled()

    def work(rank: int) -> None:
        try:
            with world.turn:
                world.wait_for_turn(rank)
            # Autograd's own threads are shared by all ranks: one that waits in a collective
            # there would keep the others from ever reaching it.
            with (
                torch.autograd.set_multithreading_enabled(False),
                torch.set_grad_enabled(grad_mode),
            ):
                results[rank] = fn(SimulatedGroup(world, rank, tuple(range(size))))
            world.finish(rank)
        except RunEnded:
            return
        except BaseException as error:
            world.fail(rank, error)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        _watch(world)
    except BaseException as error:  # an interrupt must wake the ranks before it goes on
        world.fail(None, error)
        raise
    for thread in threads:
        thread.join()
    if world.failure is not None:
        rank, cause = world.failure
        who = "" if rank is None else name(rank) if name else f"rank {rank} of {size}"
        _raise(who, rank, cause)
    return [results[rank] for rank in range(size)]


def _watch(world: _World) -> None:
    """Return when all ranks are done or one has failed; a turn that takes too long fails."""
    with world.turn:
        while world.failure is None and len(world.done) < world.size:
            running = world.running
            if not world.turn.wait(world.timeout) and running == world.running:
                raise RankError(
                    f"rank {running} of {world.size} has not ended or entered a collective for "
                    f"{world.timeout:g} s",
                    rank=running,
                )


def _raise(who: str, rank: int | None, error: BaseException) -> None:
    """Raise what ended the run, with the rank in front."""
    if rank is None or not isinstance(error, Exception):
        raise error
    if isinstance(error, InputError):
        raise InputError(f"{who}: {error}") from error
    trace = "".join(traceback.format_exception(error))
    raise RankError(
        f"{who} failed: {type(error).__name__}: {error}", rank=rank, trace=trace
    ) from error
