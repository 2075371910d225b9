"""One rank's work in its own process: the thread that does it, its device, its groups."""

from __future__ import annotations

import ctypes
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from opdtool.core.errors import InputError
from opdtool.core.group import Group
from opdtool.ranks.board import HEART, Outcome
from opdtool.ranks.errors import RankError, RunEnded
from opdtool.ranks.stores import Store, under
from opdtool.ranks.topology import Topology, coordinates, make_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work for all ranks. ``backend`` is set where the work exchanges tensors."""

    work: Callable[..., Any]
    args: Sequence[Any]
    tp_size: int
    cp_size: int
    device: str
    backend: str | None = None
    scratch: str | None = None
    """A directory to take away should the driver be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank a process is. What is to be done there comes with each task."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    timeout: float
    threads: int | None = None
    """torch's threads in this rank; None leaves them as they are."""
    secret: bytes = b""
    """What the ranks of this run sign their messages with."""

    @property
    def own_gpu(self) -> bool:
        """Whether every rank on this machine has a GPU of its own that NCCL can use."""
        return (
            torch.cuda.is_available()
            and torch.cuda.device_count() >= self.local_size
            and torch.distributed.is_nccl_available()
        )


def check_device_name(name: str) -> None:
    """Refuse what ``--device`` does not know.

    Raises:
        InputError: neither ``auto``, ``cpu``, ``cuda`` nor ``cuda:N``.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", name):
        raise InputError(f"--device {name!r} is none; write auto, cpu, cuda or cuda:N")


def rank_device(name: str, local_rank: int) -> torch.device:
    """``--device`` for one rank: under ``auto`` and ``cuda`` neighbours take turns at the GPUs.

    Raises:
        InputError: a CUDA device that is not there.
    """
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if (device.index or 0) >= gpus:
        raise InputError(f"--device {name} is not there: torch sees {gpus} CUDA devices")
    return device if device.index is not None else torch.device("cuda", local_rank % gpus)


class Performer:
    """Does one task at a time in a thread of its own, so that the main thread can listen."""

    def __init__(self, seat: Seat, connect: Callable[[], Store]) -> None:
        self.seat = seat
        self._connect = connect
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._groups: dict[tuple[int, int], tuple[Group, Group]] = {}
        self._spent: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="opdtool-rank")
        self._thread.start()

    def start(self, task: Task) -> None:
        """Begin a task."""
        self._idle.clear()
        self._tasks.put(task)

    def outcome(self) -> Outcome | None:
        """How the task ended, once; None while it runs."""
        try:
            return self._outcomes.get_nowait()
        except queue.Empty:
            return None

    def at_work(self) -> bool:
        """Whether the rank is idle, waits for others, or has worked since this was last asked.

        Waiting for others has a timeout of its own, by which the one that keeps them waiting is
        found. A task that spends no processor time and waits for no disk is stuck.
        """
        if self._idle.is_set() or self._waits():
            return True
        before, self._spent = self._spent, _time_spent()
        return self._spent is None or self._spent != before

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if frame.f_code.co_qualname in _WAITING:
                return True
            frame = frame.f_back
        return False

    def cancel(self, seconds: float) -> None:
        """Stop the running task at its next Python instruction; wait for that, within bounds."""
        if not self._idle.is_set() and self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(RunEnded)
            )
            self._idle.wait(seconds)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                self._outcomes.put(self._perform(task))
            except RunEnded:
                self._outcomes.put(Outcome("internal", "the run was ended"))
            self._idle.set()

    def _perform(self, task: Task) -> Outcome:
        try:
            if self.seat.threads is not None:
                torch.set_num_threads(self.seat.threads)
            return Outcome("ok", task.work(self._topology(task), *task.args))
        except InputError as error:
            return Outcome("input", str(error))
        except RankError as error:
            return Outcome("collective", str(error))
        except Exception as error:
            return Outcome("internal", f"{type(error).__name__}: {error}", traceback.format_exc())

    def _topology(self, task: Task) -> Topology:
        seat, sizes = self.seat, (task.tp_size, task.cp_size)
        device = rank_device(task.device, seat.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        topology = make_topology(seat.rank, seat.world_size, *sizes, device)
        if task.backend is None:
            return topology
        if sizes not in self._groups:
            self._groups[sizes] = self._join(task.backend, topology)
        tp_group, cp_group = self._groups[sizes]
        return replace(topology, tp_group=tp_group, cp_group=cp_group)

    def _join(self, backend: str, topology: Topology) -> tuple[Group, Group]:
        """Initialise torch.distributed and make this rank's TP and CP groups."""
        from opdtool.ranks.process import ProcessGroup

        seat, timeout = self.seat, timedelta(seconds=self.seat.timeout)
        try:
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group(
                    backend,
                    store=under("groups", self._connect()),  # type: ignore[arg-type]
                    rank=seat.rank,
                    world_size=seat.world_size,
                    timeout=timeout,
                )
            groups: list[Group] = []
            for members, alone in (
                (_neighbours(topology, axis=0), topology.tp_group),
                (_neighbours(topology, axis=1), topology.cp_group),
            ):
                if len(members[0]) == 1:
                    groups.append(alone)
                    continue
                mine, _ = torch.distributed.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                    members, timeout=timeout
                )
                groups.append(ProcessGroup(mine))
        except RuntimeError as error:
            raise RankError(
                f"the ranks could not form their {backend} groups: {str(error).splitlines()[0]}",
                rank=seat.rank,
            ) from error
        return groups[0], groups[1]


_WAITING = ("Performer._join", "ProcessGroup._named")
"""The functions in which a rank waits for others."""


def _time_spent() -> int | None:
    """The processor time of this process's threads, but for those that listen and beat, in
    ticks; another number each time while one of them waits for a disk; None where the system
    does not tell."""
    listening = {
        thread.native_id
        for thread in threading.enumerate()
        if thread is threading.main_thread() or thread.name == HEART
    }
    ticks = 0
    try:
        tasks = [task for task in os.listdir("/proc/self/task") if int(task) not in listening]
    except OSError:
        return None
    for task in tasks:
        with suppress(OSError):  # a thread may have ended meanwhile
            stat = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
            if stat[0] == "D":
                return -time.monotonic_ns()
            ticks += int(stat[11]) + int(stat[12])
    return ticks


def _neighbours(topology: Topology, *, axis: int) -> list[list[int]]:
    """All groups of ranks that differ in their tensor- (0) or context-parallel (1) rank alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size):
        place = list(coordinates(rank, topology.tp_size, topology.cp_size))
        del place[axis]
        groups.setdefault(tuple(place), []).append(rank)
    return list(groups.values())
