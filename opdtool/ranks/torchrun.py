"""Meeting the other ranks that torchrun started, and watching the one that drives."""

from __future__ import annotations

import atexit
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
from opdtool.ranks.ending import driven, exit_status, leave
from opdtool.ranks.errors import RankError
from opdtool.ranks.member import Member
from opdtool.ranks.perform import Performer, Seat
from opdtool.ranks.stores import Store, connect_store, under
from opdtool.ranks.topology import describe_rank

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
    """The ranks that torchrun started; in all of them but rank 0 this never returns."""
    env = os.environ
    world, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
    seat = Seat(
        rank=rank,
        world_size=world,
        tp_size=ranks.tp_size,
        cp_size=ranks.cp_size,
        local_rank=int(env["LOCAL_RANK"]),
        local_size=int(env.get("LOCAL_WORLD_SIZE", world)),
        device=ranks.device,
        timeout=ranks.timeout,
    )
    try:
        store = meet(seat)  # kept: where rank 0 hosts the store it lives as long as this does
    except RuntimeError as error:
        raise RankError(
            f"{describe_rank(rank, world, 1, 1)} could not reach the others at "
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
        tp_size=ranks.tp_size,
        cp_size=ranks.cp_size,
        world_size=world,
        timeout=ranks.timeout,
        deaths=dict,
        own=Performer(seat, connect),
    )

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
    with driven(driver), _agreed_exit():
        driver.greet(seat.own_gpu)
        if world % (ranks.tp_size * ranks.cp_size):
            raise InputError(
                f"torchrun started {world} processes, which is no multiple of TP {ranks.tp_size} x "
                f"CP {ranks.cp_size} = {ranks.tp_size * ranks.cp_size}; change --nproc-per-node, "
                "--nnodes, --tp or --cp"
            )
        driver.gather()
        yield replace(ranks, dp_size=world // (ranks.tp_size * ranks.cp_size), driver=driver)
    del store


@contextmanager
def _agreed_exit() -> Iterator[None]:
    """This process will end with the status it has told the others, whatever the libraries
    would do at exit (see :func:`opdtool.ranks.ending.leave`)."""
    try:
        yield
    except BaseException as error:
        atexit.register(leave, exit_status(error))
        raise
    atexit.register(leave, 0)
