"""Which device a rank takes."""

from __future__ import annotations

import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.ranks.perform import rank_device


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
