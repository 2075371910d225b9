"""Ranks as processes that this one starts."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch

from opdtool.ranks.board import Board
from opdtool.ranks.driver import Driver
from opdtool.ranks.ending import driven, leave
from opdtool.ranks.member import LOST, Member
from opdtool.ranks.perform import Seat, rank_device
from opdtool.ranks.stores import Store, connect_store, host_store, under

if TYPE_CHECKING:
    from opdtool.ranks.launch import Ranks


def _rank_process(seat: Seat, port: int, parent: int) -> NoReturn:
    """The body of a process that ``--ranks spawn`` started; never returns.

    An orphan notices within a moment that its parent has changed, and ends.
    """
    # An interrupt from the terminal reaches the whole process group: the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def lost() -> str | None:
        return "the process that started the ranks has died" if os.getppid() != parent else None

    def reach() -> Store:
        return connect_store("127.0.0.1", port, seat.timeout)

    status, reached = LOST, threading.Event()
    threading.Thread(target=_watch, args=(lost, reached), daemon=True).start()
    try:
        member = Member(seat, reach, lost, speaks=seat.rank == 0)
        reached.set()
        status = member.serve()
    finally:
        leave(status)


def _watch(lost: Callable[[], str | None], reached: threading.Event) -> None:
    """End this process should its parent die before the rank has reached its store: that waits
    for a store which is no more, and there is nothing to take away yet."""
    while not reached.wait(0.2):
        if lost() is not None:
            leave(LOST)


@contextmanager
def spawned_ranks(ranks: Ranks) -> Iterator[Ranks]:
    """One process a rank, children of this one, on a store that this one hosts."""
    rank_device(ranks.device, 0)
    store = host_store()
    secret = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(ranks.world_size):
        seat = Seat(
            rank=rank,
            world_size=ranks.world_size,
            local_rank=rank,
            local_size=ranks.world_size,
            timeout=ranks.timeout,
            threads=torch.get_num_threads(),
            secret=secret,
        )
        processes.append(
            context.Process(
                target=_rank_process,
                args=(seat, store.port, os.getpid()),
                name=f"opdtool-rank-{rank}",
                daemon=True,
            )
        )

    def deaths() -> dict[int, str]:
        return {
            rank: _how(process.exitcode)
            for rank, process in enumerate(processes)
            if process.exitcode is not None
        }

    try:
        for process in processes:
            process.start()
        driver = Driver(
            Board(under("opdtool", store), secret),
            world_size=ranks.world_size,
            timeout=ranks.timeout,
            deaths=deaths,
        )
        driver.sizes = (ranks.tp_size, ranks.cp_size)
        with driven(driver):
            driver.gather()
            yield replace(ranks, driver=driver)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join(5.0)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code} before its work was done"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    return f"was killed by signal {-code} ({name})"
