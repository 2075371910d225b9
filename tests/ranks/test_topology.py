"""Ranks have the coordinates that Megatron gives them, and every item is somebody's."""

from __future__ import annotations

import pytest
import torch

from opdtool.ranks.topology import QuietGroup, Topology, coordinates, describe_rank, make_topology


def _all(world: int, tp: int, cp: int) -> list[Topology]:
    return [make_topology(rank, world, tp, cp, torch.device("cpu")) for rank in range(world)]


def test_tensor_parallel_ranks_are_neighbours_and_replicas_are_farthest() -> None:
    places = [coordinates(rank, 2, 2) for rank in range(8)]
    assert places == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 1),
        (1, 1, 1),
    ]
    assert [topology.rank for topology in _all(8, 2, 2)] == list(range(8))


def test_an_error_names_the_replica_only_where_there_are_several() -> None:
    assert describe_rank(3, 4, 2, 2) == "rank 3 of 4 (tp 1, cp 1)"
    assert describe_rank(6, 8, 2, 2) == "rank 6 of 8 (tp 0, cp 1, dp 1)"


@pytest.mark.parametrize(("tp", "cp", "dp"), [(1, 1, 1), (1, 2, 2), (2, 1, 3), (2, 2, 2)])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_replicas_share_every_item_out_once_and_evenly(
    tp: int, cp: int, dp: int, count: int
) -> None:
    items = list(range(count))
    shares: dict[int, list[int]] = {}
    for topology in _all(tp * cp * dp, tp, cp):
        share = topology.share(items)
        # Ranks of one replica have the same share.
        assert shares.setdefault(topology.dp_rank, share) == share
    assert len(shares) == dp
    assert sorted(item for share in shares.values() for item in share) == items
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1


@pytest.mark.parametrize(("tp", "cp", "dp"), [(2, 2, 1), (2, 1, 3), (1, 2, 2)])
def test_tensor_parallel_ranks_share_equal_work_too(tp: int, cp: int, dp: int) -> None:
    items = list(range(11))
    for cp_rank in range(cp):
        mine = [t for t in _all(tp * cp * dp, tp, cp) if t.cp_rank == cp_rank]
        assert len(mine) == tp * dp
        assert sorted(item for t in mine for item in t.share_with_tp(items)) == items


def test_a_group_that_exchanges_nothing_refuses_to() -> None:
    alone, pair = QuietGroup(0, 1), QuietGroup(1, 2)
    x = torch.arange(3)
    assert alone.all_gather(x)[0].equal(x)
    assert alone.all_to_all([x])[0].equal(x)
    with pytest.raises(AssertionError, match="without collectives"):
        pair.all_gather(x)
