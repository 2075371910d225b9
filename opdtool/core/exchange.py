"""Moving columns of a sharded tensor to the ranks that want them, and gradients back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opdtool.core.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlan:
    """Which columns one rank sends to and takes from each other one.

    ``leaving[r]`` are columns of this rank's shard that rank r wants; ``places[r]`` are the
    columns of this rank's result that come from rank r. Both in the order of the result, so
    that they need no index on the way.

        ids 1 2 5 7, V 8, 2 ranks:   rank 0 owns 0..3 and wants 1 2, rank 1 owns 4..7 and wants 5 7
        ids 1 5 2 7:                 rank 0 wants 1 (its own) and 5, rank 1 wants 2 and 7 (its own)
            rank 0: leaving [1] [2], places [0] [1];  rank 1: leaving [1] [3], places [0] [1]
    """

    V_local: int
    leaving: tuple[Tensor, ...]
    places: tuple[Tensor, ...]

    @staticmethod
    def of(ids: Tensor, *, V_local: int, rank: int, size: int) -> ColumnPlan:
        """The plan of one rank, for target ids [D] that all ranks know."""
        owner_by_wanter = torch.div(ids, V_local, rounding_mode="floor").reshape(size, -1)
        column_by_wanter = torch.remainder(ids, V_local).reshape(size, -1)
        return ColumnPlan(
            V_local=V_local,
            leaving=tuple(
                column_by_wanter[wanter][owner_by_wanter[wanter] == rank] for wanter in range(size)
            ),
            places=tuple(
                (owner_by_wanter[rank] == owner).nonzero().squeeze(-1) for owner in range(size)
            ),
        )


def exchange_columns(local: Tensor, plan: ColumnPlan, group: Group) -> Tensor:
    """This rank's wanted columns [..., D_local], of every rank's ``local`` [..., V_local].

    Differentiable backward and forward, twice too. All ranks of the group must want a
    derivative, or none: each is a collective.
    """
    out: Tensor = _Fetch.apply(local, plan, group)  # type: ignore[no-untyped-call]
    return out


def _fetch(local: Tensor, plan: ColumnPlan, group: Group) -> Tensor:
    """Send columns of the shard to where they are wanted; put those that come in their places."""
    sent = [local.index_select(-1, columns.to(local.device)) for columns in plan.leaving]
    received = group.all_to_all(sent, [len(places) for places in plan.places])
    order = torch.cat(plan.places)
    joined = torch.cat(received, dim=-1)
    if bool((order[1:] > order[:-1]).all()):  # ascending ids arrive in order
        return joined
    return joined.index_select(-1, order.argsort().to(local.device))


def _return(wanted: Tensor, plan: ColumnPlan, group: Group) -> Tensor:
    """The transpose of :func:`_fetch`: every column back to its owner, summed there."""
    sent = [wanted.index_select(-1, places.to(wanted.device)) for places in plan.places]
    received = group.all_to_all(sent, [len(columns) for columns in plan.leaving])
    owned = wanted.new_zeros(*wanted.shape[:-1], plan.V_local)
    for columns, piece in zip(plan.leaving, received, strict=True):
        owned.index_add_(-1, columns.to(wanted.device), piece)
    return owned


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(local: Tensor, plan: ColumnPlan, group: Group) -> Tensor:
        return _fetch(local, plan, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.plan, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Return.apply(grads[0], ctx.plan, ctx.group), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return exchange_columns(tangents[0], ctx.plan, ctx.group)


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(wanted: Tensor, plan: ColumnPlan, group: Group) -> Tensor:
        return _return(wanted, plan, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.plan, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return exchange_columns(grads[0], ctx.plan, ctx.group), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        out: Tensor = _Return.apply(tangents[0], ctx.plan, ctx.group)  # type: ignore[no-untyped-call]
        return out
