"""Rank-local work for the tests of launching, and a command that runs it as users run ours."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer

from opdtool.core.errors import InputError
from opdtool.ranks.ending import settle
from opdtool.ranks.topology import Topology


def whereabouts(topology: Topology, word: str = "") -> tuple[int, ...]:
    """This rank's coordinates and sizes."""
    assert word in ("", "word")
    return (
        topology.tp_rank,
        topology.cp_rank,
        topology.dp_rank,
        topology.tp_size,
        topology.cp_size,
        topology.dp_size,
    )


def shares(topology: Topology, items: list[int]) -> list[int]:
    """The items that are this replica's."""
    return topology.share(items)


def shares_with_tp(topology: Topology, items: list[int]) -> list[int]:
    """The items that are this replica's and tensor-parallel rank's."""
    return topology.share_with_tp(items)


def neighbours(topology: Topology) -> tuple[list[int], list[int]]:
    """The global ranks of this rank's tensor- and context-parallel groups, by asking them."""
    mine = torch.tensor([topology.rank])
    return (
        [int(t) for t in topology.tp_group.all_gather(mine)],
        [int(t) for t in topology.cp_group.all_gather(mine)],
    )


def process_id(topology: Topology) -> tuple[int, int]:
    """This rank's process and its torch threads."""
    return os.getpid(), torch.get_num_threads()


def write_own_file(topology: Topology, folder: Path) -> str:
    """Writes one file named after the rank."""
    path = folder / f"rank{topology.rank}"
    path.write_text(str(topology.rank))
    return path.name


def fail_on(topology: Topology, rank: int, how: str) -> Any:
    """Goes wrong on one rank, in one of many ways; the others wait for it in a collective."""
    if topology.rank == rank:
        if how == "input":
            raise InputError("the payload is too narrow; pass a wider one")
        if how == "internal":
            raise KeyError("no such thing")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "exit":
            os._exit(0)
        if how == "sleep":
            time.sleep(600)
        if how == "shape":
            return topology.tp_group.all_gather(torch.zeros(3))
        if how == "unpicklable":
            return lambda: None
    return topology.tp_group.all_gather(torch.zeros(2))


def sleep_on(topology: Topology, rank: int) -> int:
    """Stands still on one rank, for which the others do not wait in any collective."""
    if topology.rank == rank:
        time.sleep(600)
    return topology.rank


def busy_on(topology: Topology, rank: int, seconds: float) -> int:
    """Computes for a while on one rank, the same thing again and again."""
    end = time.monotonic() + (seconds if topology.rank == rank else 0)
    square = torch.ones(600, 600)
    while time.monotonic() < end:
        torch.mm(square, square)
    return topology.rank


def write_slowly(topology: Topology, folder: Path, seconds: float) -> None:
    """Writes a little file again and again, for as long as it is let."""
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        (folder / f"rank{topology.rank}.{number}").write_text("x" * 100)
        (folder / "pid").mkdir(exist_ok=True)
        (folder / "pid" / f"{topology.rank}").write_text(str(os.getpid()))
        number += 1
        time.sleep(0.01)


def backward(topology: Topology) -> float:
    """A backward pass after a collective: what makes gloo processes abort at exit."""
    x = torch.ones(4, requires_grad=True)
    topology.tp_group.all_gather(x)
    (x * x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return float(x.grad.sum())


def main(argv: list[str]) -> None:
    """``python -m tests.ranks.jobs JOB MODE TP CP TIMEOUT [OUT]``, with opdtool's exit statuses."""
    from opdtool.cli.main import guarded

    job, mode, tp, cp, timeout = argv[:5]
    out = Path(argv[5]) if len(argv) > 5 else None
    status = 0
    try:
        guarded(_command)(job, mode, int(tp), int(cp), float(timeout), out)
    except typer.Exit as end:
        status = end.exit_code
    settle(status)
    sys.exit(status)


@contextmanager
def hidden(final: Path) -> Iterator[Path]:
    """A directory that gets its final name only if all goes well, as OutputDir makes it."""
    work = final.with_name(f".{final.name}.part")
    work.mkdir()
    try:
        yield work
        work.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _command(job: str, mode: str, tp: int, cp: int, timeout: float, out: Path | None) -> None:
    from opdtool.ranks.launch import open_ranks

    with open_ranks(mode, tp_size=tp, cp_size=cp, timeout=timeout, device="cpu") as ranks:
        print("driver", os.getpid(), flush=True)
        if job == "whereabouts":
            print(ranks.run(whereabouts), flush=True)
        elif job == "backward":
            print(ranks.run_collective(backward), flush=True)
        elif job == "write":
            assert out is not None
            with hidden(out) as folder:
                ranks.run_writing(folder, write_slowly, folder, 60.0)
        elif job.startswith("alone-"):
            ranks.run(sleep_on, int(job.removeprefix("alone-")))
        elif job.startswith("busy-"):
            print(ranks.run(busy_on, int(job.removeprefix("busy-")), 3 * timeout), flush=True)
        elif job != "exit1":
            how, rank = job.split("-")
            ranks.run_collective(fail_on, int(rank), how)
    if job == "exit1":  # after the ranks' work, and after other work in another grid
        with open_ranks(mode, tp_size=1, cp_size=2, timeout=timeout, device="cpu") as ranks:
            print(ranks.run_collective(neighbours), flush=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
