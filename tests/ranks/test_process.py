"""Process groups: real gloo processes, and the same answers as the simulated group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.core.group import Group, as_group, group_rank_size, is_group
from opdtool.ranks.process import ProcessGroup, transport_device
from opdtool.ranks.simulated import run_simulated
from tests.ranks.workers import run_gloo

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64]


def exchange(group: Group) -> dict[str, Any]:
    """Every collective in every dtype, with uneven widths, an empty message among them."""
    out: dict[str, Any] = {}
    for dtype in DTYPES:
        mine = (torch.arange(6).reshape(2, 3) + 5 * group.rank).to(dtype)
        out[f"gather {dtype}"] = group.all_gather(mine)
        sent = [mine[:, : (group.rank + to) % 3] for to in range(group.size)]
        told = [(group.rank + r) % 3 for r in range(group.size)]
        out[f"swap {dtype}"] = group.all_to_all(sent)
        out[f"swap told {dtype}"] = group.all_to_all(sent, told)
    return out


def real() -> dict[str, Any]:
    world: Any = torch.distributed.group.WORLD
    assert not is_group(world)
    assert group_rank_size(world) == (world.rank(), world.size())
    assert as_group(world).rank == world.rank()
    checked, bare = exchange(ProcessGroup()), exchange(as_group(world))
    return {"checked": checked, "bare": bare, "disagreements": disagreements(ProcessGroup())}


def disagreements(group: Group) -> list[str]:
    """The errors of ranks that bring different things; the group works on afterwards."""
    said = []
    attempts: tuple[Callable[[], object], ...] = (
        lambda: group.all_gather(torch.zeros(1 + group.rank)),
        lambda: group.all_gather(torch.zeros(1, dtype=[torch.float32, torch.int32][group.rank])),
        lambda: group.all_to_all([torch.zeros(2)] * 2, [2, 2 + group.rank]),
        lambda: (
            group.all_gather(torch.zeros(2))
            if group.rank
            else group.all_to_all([torch.zeros(2)] * 2)
        ),
    )
    for attempt in attempts:
        try:
            attempt()
            said.append("nothing")
        except InputError as error:
            said.append(str(error))
    assert len(group.all_gather(torch.zeros(1))) == 2
    return said


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_gloo(2, real, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("kind", ["checked", "bare"])
def test_gloo_brings_the_same_tensors_as_the_simulated_group(
    gloo: list[dict[str, Any]], kind: str
) -> None:
    simulated = run_simulated(2, exchange)
    assert simulated[0]["swap torch.float32"][1].tolist() == [[5.0], [8.0]]
    for rank in range(2):
        for name, expected in simulated[rank].items():
            got = gloo[rank][kind][name]
            assert [t.dtype for t in got] == [t.dtype for t in expected]
            assert [t.tolist() for t in got] == [t.tolist() for t in expected], name


def test_gloo_ranks_that_disagree_are_told_so_instead_of_hanging(
    gloo: list[dict[str, Any]],
) -> None:
    shapes, dtypes, widths, collectives = gloo[0]["disagreements"]
    assert shapes == (
        "the ranks disagree: rank 0 enters all_gather with torch.float32 [1], "
        "rank 1 all_gather with torch.float32 [2]"
    )
    assert dtypes.endswith("rank 1 all_gather with torch.int32 [1]")
    assert widths.endswith("rank 1 expects 3 columns of rank 1, which sends 2")
    assert "rank 0 enters all_to_all" in collectives
    assert collectives.endswith("rank 1 all_gather with torch.float32 [2]")
    assert gloo[1]["disagreements"] == gloo[0]["disagreements"]


def test_a_group_of_processes_needs_torch_distributed() -> None:
    from opdtool.ranks.errors import RankError

    with pytest.raises(RankError, match="not initialised"):
        ProcessGroup()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_brings_what_one_rank_sends_itself(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        group = ProcessGroup()
        assert transport_device(group.group).type == "cuda"
        got = group.all_to_all([torch.arange(4.0)])[0]
        assert got.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert got.device.type == "cpu"
    finally:
        torch.distributed.destroy_process_group()
