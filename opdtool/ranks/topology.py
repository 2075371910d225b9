"""Who a rank is: its coordinates, its groups, its device, and which items are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from opdtool.core.group import Group

Item = TypeVar("Item")


def coordinates(rank: int, tp_size: int, cp_size: int) -> tuple[int, int, int]:
    """(tp_rank, cp_rank, dp_rank) of a global rank.

    Tensor-parallel ranks are neighbours, then context-parallel ones, then replicas, the
    order that Megatron lays them out in: ``rank = tp + TP * (cp + CP * dp)``.
    """
    rest, tp_rank = divmod(rank, tp_size)
    dp_rank, cp_rank = divmod(rest, cp_size)
    return tp_rank, cp_rank, dp_rank


def describe_rank(rank: int, world_size: int, tp_size: int, cp_size: int) -> str:
    """A rank as an error names it: ``rank 5 of 8 (tp 1, cp 0, dp 1)``."""
    tp_rank, cp_rank, dp_rank = coordinates(rank, tp_size, cp_size)
    replica = f", dp {dp_rank}" if world_size > tp_size * cp_size else ""
    return f"rank {rank} of {world_size} (tp {tp_rank}, cp {cp_rank}{replica})"


@dataclass(frozen=True, slots=True)
class QuietGroup:
    """A group that only says its rank and size, for work that exchanges nothing."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor itself in a group of one."""
        return self._alone("all_gather", [tensor.detach().clone()])

    def all_to_all(
        self, tensors: Sequence[Tensor], widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The tensor itself in a group of one."""
        return self._alone("all_to_all", [tensor.detach().clone() for tensor in tensors])

    def _alone(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        if self.size > 1:
            raise AssertionError(f"{name} in a run that was started without collectives")
        return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What rank-local work may know of the world.

    ``tp_group`` and ``cp_group`` always say rank and size; they exchange tensors only in a
    ``run_collective``. ``tp_ranks`` and ``cp_ranks`` are the ranks that this one call stands
    for: one each, but in ``run_together`` over simulated ranks, where it stands for all.
    """

    tp_size: int
    cp_size: int
    dp_size: int
    tp_rank: int
    cp_rank: int
    dp_rank: int
    tp_ranks: tuple[int, ...]
    cp_ranks: tuple[int, ...]
    device: torch.device
    tp_group: Group
    cp_group: Group

    @property
    def rank(self) -> int:
        """The global rank; 0 for a call that stands for all ranks."""
        return self.tp_rank + self.tp_size * (self.cp_rank + self.cp_size * self.dp_rank)

    @property
    def world_size(self) -> int:
        """TP x CP x DP."""
        return self.tp_size * self.cp_size * self.dp_size

    def share(self, items: Sequence[Item]) -> list[Item]:
        """The items (files, bins, rows) that are this data-parallel replica's.

        items 0..6, DP 2:   replica 0 has 0 2 4 6, replica 1 has 1 3 5
        """
        return list(items[self.dp_rank :: self.dp_size])

    def share_with_tp(self, items: Sequence[Item]) -> list[Item]:
        """As :meth:`share`, over the tensor-parallel ranks too: for work in which all
        tensor-parallel ranks would do the same."""
        if self.tp_ranks != (self.tp_rank,):
            return self.share(items)
        first = self.dp_rank * self.tp_size + self.tp_rank
        return list(items[first :: self.dp_size * self.tp_size])

    def share_with_all(self, items: Sequence[Item]) -> list[Item]:
        """The items that are this rank's, shared out over all ranks."""
        return list(items[self.rank :: self.world_size])


def make_topology(
    rank: int, world_size: int, tp_size: int, cp_size: int, device: torch.device
) -> Topology:
    """The topology of one rank, without groups."""
    tp_rank, cp_rank, dp_rank = coordinates(rank, tp_size, cp_size)
    return Topology(
        tp_size=tp_size,
        cp_size=cp_size,
        dp_size=world_size // (tp_size * cp_size),
        tp_rank=tp_rank,
        cp_rank=cp_rank,
        dp_rank=dp_rank,
        tp_ranks=(tp_rank,),
        cp_ranks=(cp_rank,),
        device=device,
        tp_group=QuietGroup(tp_rank, tp_size),
        cp_group=QuietGroup(cp_rank, cp_size),
    )
