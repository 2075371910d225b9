"""Real processes for tests: gloo ranks that meet through a file, their results brought home."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def run_gloo(size: int, fn: Callable[[], Any], folder: Path, *, timeout: float = 60.0) -> list[Any]:
    """What ``fn()`` returns in each of ``size`` spawned gloo processes, in rank order.

    ``fn`` is a module-level function; a process in which it raises returns the text of the
    traceback as ``RuntimeError`` here.
    """
    context = mp.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_work, args=(rank, size, fn, folder, timeout))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout + 60)
        if process.is_alive():
            process.kill()
    results = []
    for rank in range(size):
        path = folder / f"result.{rank}.pt"
        if not path.exists():
            raise RuntimeError(f"rank {rank} left no result (exit {processes[rank].exitcode})")
        kind, value = torch.load(path, weights_only=False)
        if kind == "error":
            raise RuntimeError(f"rank {rank}:\n{value}")
        results.append(value)
    return results


def _work(rank: int, size: int, fn: Callable[[], Any], folder: Path, timeout: float) -> None:
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        result = ("value", fn())
    except BaseException:
        result = ("error", traceback.format_exc())
    torch.save(result, folder / f"result.{rank}.tmp")
    (folder / f"result.{rank}.tmp").rename(folder / f"result.{rank}.pt")
    sys.stdout.flush()
    # Threads of gloo and of autograd may abort an ordinary exit after all the work is done.
    os._exit(0)
