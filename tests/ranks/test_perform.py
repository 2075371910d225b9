"""Which device a rank takes, and whether its work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.ranks.perform import Performer, Seat, Task, rank_device
from opdtool.ranks.process import ProcessGroup
from opdtool.ranks.topology import Topology


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return 2


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_neighbours_take_turns_at_the_gpus(gpus: int, name: str) -> None:
    taken = [rank_device(name, rank) for rank in range(2 * gpus)]
    assert taken == [torch.device("cuda", index) for index in (0, 1, 0, 1)]


def test_a_gpu_that_is_named_is_every_ranks(gpus: int) -> None:
    assert {rank_device("cuda:1", rank) for rank in range(gpus)} == {torch.device("cuda", 1)}
    assert rank_device("cpu", 1) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_refused(gpus: int) -> None:
    with pytest.raises(InputError, match="--device cuda:2 is not there: torch sees 2 CUDA"):
        rank_device("cuda:2", 0)


def test_without_gpus_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device("auto", 3) == torch.device("cpu")
    for name in ("cuda", "cuda:0"):
        with pytest.raises(InputError, match=f"--device {name} is not there: torch sees 0"):
            rank_device(name, 0)


@pytest.fixture
def watched() -> Iterator[Callable[[Callable[[], Any], float], list[bool]]]:
    """What a rank says of itself, three times ``apart`` seconds, while it does some work."""
    release = threading.Event()

    def no_store() -> Any:
        raise AssertionError("nothing is exchanged")

    def watch(work: Callable[[], Any], apart: float) -> list[bool]:
        performer = Performer(
            Seat(rank=0, world_size=1, local_rank=0, local_size=1, timeout=60), no_store
        )
        assert performer.at_work()

        def until_released(topology: Topology) -> None:
            while not release.is_set():
                work()

        performer.start(Task(work=until_released, args=(), tp_size=1, cp_size=1, device="cpu"))
        time.sleep(apart)
        performer.at_work()
        said = []
        for _ in range(3):
            time.sleep(apart)
            said.append(performer.at_work())
        return said

    yield watch
    release.set()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="times are read from /proc")
def test_a_rank_that_stands_still_is_not_at_work_and_one_that_computes_is(
    watched: Callable[[Callable[[], Any], float], list[bool]],
) -> None:
    assert False in watched(lambda: time.sleep(5), 0.2)
    assert watched(lambda: sum(range(1000)), 0.7) == [True] * 3


def test_a_rank_that_waits_for_others_is_at_work(
    watched: Callable[[Callable[[], Any], float], list[bool]],
) -> None:
    group = ProcessGroup.__new__(ProcessGroup)

    def others() -> list[torch.Tensor]:
        time.sleep(5)
        return []

    def wait() -> Any:
        return group._named("all_gather", others)

    assert watched(wait, 0.1) == [True] * 3
