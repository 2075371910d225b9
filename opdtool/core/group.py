"""What a rank group is. Core functions take one and never ask the world who they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Group(Protocol):
    """A set of ranks that exchange tensors.

    Both the simulated groups and the torch.distributed ones of ``opdtool.ranks`` are
    groups. Every collective must be entered by all ranks of the group.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the group, 0..size-1."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, in rank order. All have one shape and dtype. No autograd."""

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send ``tensors[r]`` to rank r; returns what each rank sent here. No autograd.

        Shapes may differ from rank to rank in their last dimension alone; all other
        dimensions and the dtype agree over the group.
        """


def group_rank_size(group: object | None) -> tuple[int, int]:
    """(rank, size) of a group: ours, a ``torch.distributed`` one, or None for a single rank.

    A group that is not one of ours is asked through ``torch.distributed.get_rank`` and
    ``get_world_size`` at call time.
    """
    if group is None:
        return 0, 1
    if isinstance(group, Group):
        return group.rank, group.size
    return (
        torch.distributed.get_rank(group),  # type: ignore[arg-type]
        torch.distributed.get_world_size(group),  # type: ignore[arg-type]
    )
