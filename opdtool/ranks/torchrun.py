"""Meeting the other ranks that torchrun started, and watching the one that drives."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.rendezvous import rendezvous

from opdtool.core.errors import InputError
from opdtool.ranks.board import Board, Greeting
from opdtool.ranks.driver import Driver
from opdtool.ranks.ending import leave, settle_later, waiting_driver
from opdtool.ranks.errors import RankError
from opdtool.ranks.member import Member
from opdtool.ranks.perform import Performer, Seat
from opdtool.ranks.stores import Store, connect_store, under

if TYPE_CHECKING:
    from opdtool.ranks.launch import Ranks


def meet(seat: Seat) -> Store:
    """The store that torchrun's environment describes; rank 0 hosts it where torchrun does not."""
    found = rendezvous("env://", timeout=timedelta(seconds=seat.timeout + 60))
    store: Store = next(iter(found))[0]
    return store


def reach(seat: Seat) -> Store:
    """A further connection to that store, once :func:`meet` has returned."""
    env = os.environ
    store = connect_store(env["MASTER_ADDR"], int(env["MASTER_PORT"]), seat.timeout)
    # One run may use one store for several attempts.
    attempt = f"{env['TORCHELASTIC_RUN_ID']}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return under(attempt, store)


class DriverWatch:
    """Whether rank 0's process still lives: by its process id on this machine, else by its
    heartbeat."""

    def __init__(self, seat: Seat, board: Board) -> None:
        self._seat = seat
        self._board = board
        self._greeting: Greeting | None = None
        self._beat = (-1, time.monotonic())

    def lost(self) -> str | None:
        """Why rank 0 counts as lost, or None while it lives."""
        now = time.monotonic()
        if self._greeting is None:
            self._greeting = self._board.read("hello/0")
        if self._greeting is not None and self._greeting.gone():
            return self._says("has died")
        beat = self._board.count("beat/driver", 0)
        if beat != self._beat[0]:
            self._beat = (beat, now)
        elif now - self._beat[1] > self._seat.timeout + (60 if self._greeting is None else 0):
            return self._says(f"has not answered for {now - self._beat[1]:.0f} s")
        return None

    def _says(self, what: str) -> str:
        return f"rank 0 of {self._seat.world_size}, which drives the run, {what}"


@contextmanager
def torchrun_ranks(ranks: Ranks) -> Iterator[Ranks]:
    """The ranks that torchrun started; in all of them but rank 0 this never returns.

    The others wait on after the body, for further ones or for this process's exit status.
    """
    driver = waiting_driver() or _meet_all(ranks.timeout)
    size = ranks.tp_size * ranks.cp_size
    if driver.world_size % size:
        raise InputError(
            f"torchrun started {driver.world_size} processes, which is no multiple of "
            f"TP {ranks.tp_size} x CP {ranks.cp_size} = {size}; change --nproc-per-node, "
            "--nnodes, --tp or --cp"
        )
    if driver.ended:
        raise RankError("the ranks have ended with the failure before")
    driver.sizes = (ranks.tp_size, ranks.cp_size)
    driver.gather()
    yield replace(ranks, dp_size=driver.world_size // size, driver=driver)


def _meet_all(timeout: float) -> Driver:
    """The driver, in rank 0's process; the other processes become members and end here."""
    env = os.environ
    world, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
    seat = Seat(
        rank=rank,
        world_size=world,
        local_rank=int(env["LOCAL_RANK"]),
        local_size=int(env.get("LOCAL_WORLD_SIZE", world)),
        timeout=timeout,
    )
    try:
        _hosted.append(meet(seat))
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} of {world} could not reach the others at "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}: {str(error).splitlines()[0]}",
            rank=rank,
        ) from error

    def connect() -> Store:
        return reach(seat)

    if rank > 0:
        watch = DriverWatch(seat, Board(under("opdtool", connect())))
        member = Member(seat, connect, watch.lost, speaks=rank == 1)
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, member.terminate)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        leave(member.serve())

    driver = Driver(
        Board(under("opdtool", connect())),
        world_size=world,
        timeout=timeout,
        deaths=dict,
        own=Performer(seat, connect),
    )
    driver.greet(seat.own_gpu)
    settle_later(driver)

    def terminated(number: int, _: Any) -> None:
        # torchrun asks all ranks to end when one has: find out which, and name it.
        limit = time.monotonic() + 3.0
        while time.monotonic() < limit:
            found = driver.lost(2.5)
            if found is not None:
                raise RankError(f"{driver.name(found[0])} {found[1]}", rank=found[0])
            time.sleep(0.05)
        sys.exit(128 + number)

    with suppress(ValueError):
        signal.signal(signal.SIGTERM, terminated)
    return driver


_hosted: list[Store] = []
"""Where rank 0 hosts the store it lives as long as this does."""
