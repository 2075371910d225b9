"""Derivatives forward and backward: none is dropped, and no rank falls out of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad as typed_forward_ad

from opdtool.core.exchange import ColumnPlan, exchange_columns
from opdtool.core.group import Group
from opdtool.core.layout import PackedLayout
from opdtool.core.masks import pack_rolled_draft_token_mask
from opdtool.core.packing import gather_cp, pack, pack_input_ids, roll_packed_seq_dim, unpack
from opdtool.core.teacher import (
    project_hidden_states_per_teacher,
    reconstruct_opd_full_teacher_logits,
)
from opdtool.core.vocab import d2t_from_ids, map_teacher_logits_to_draft_vocab
from opdtool.ranks.simulated import run_simulated

forward_ad: Any = typed_forward_ad  # torch gives its functions no types
ONE = PackedLayout.from_cu_seqlens((0, 3, 5), (0, 4, 8))
TWO = ONE.with_cp(2)
HEAD = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 3.0]])
D2T = d2t_from_ids(torch.tensor([2, 0]))

LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "pack": lambda x: pack(x, TWO, cp_rank=1, shift=-1),
    "pack_input_ids": lambda x: pack_input_ids(x, (0, 3, 5), (0, 4, 8)),
    "roll": lambda x: roll_packed_seq_dim(x, (0, 1, 3), 1),
    "mask of tokens": lambda x: pack_rolled_draft_token_mask(
        x, torch.tensor([2.0, 3.0]), (0, 3, 5), (0, 4, 8)
    ),
    "mask of samples": lambda x: pack_rolled_draft_token_mask(
        torch.tensor([[0.0, 2, 3], [4, 5, 6]]), x[:, 0], (0, 3, 5), (0, 4, 8)
    ),
    "unpack": lambda x: unpack(torch.cat([x.reshape(6), x[0, :2]]), ONE, rows=2, width=3),
    "gather_cp": lambda x: gather_cp(
        [torch.cat([x[0], x[1, :1]]), torch.cat([x[1], x[0, :1]])], TWO
    ),
    "draft columns": lambda x: map_teacher_logits_to_draft_vocab(x, D2T),
    "projection": lambda x: project_hidden_states_per_teacher(
        x[:, None], {0: HEAD, 1: 2 * HEAD}, torch.tensor([1, 0])
    ),
    "hidden states": lambda x: reconstruct_opd_full_teacher_logits(
        x[None],
        teacher_payload="hidden_states",
        student_logits=torch.empty(1, 2, 2),
        vocab_parallel_rank=0,
        context_parallel_group=None,
        teacher_output_layer_weight_by_index={0: HEAD},
    ),
    "logits": lambda x: reconstruct_opd_full_teacher_logits(
        x[None],
        teacher_payload="logits",
        student_logits=torch.empty(1, 4, 1),
        vocab_parallel_rank=2,
        context_parallel_group=None,
    ),
}
X = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
T = torch.tensor([[10.0, -20, 30], [40, 50, -60]])


@pytest.mark.parametrize("name", LINEAR)
def test_a_tangent_goes_through_as_the_values_do(name: str) -> None:
    """Every function is linear: what it does to a tangent is what it does to values."""
    function = LINEAR[name]
    want = function(T)
    assert want.any()
    values, tangent = torch.func.jvp(function, (X,), (T,))[:2]
    assert torch.equal(values, function(X))
    assert torch.equal(tangent, want)
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(X, T))
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, want)


def test_a_tangent_of_one_shard_alone_is_gathered() -> None:
    shards = [torch.arange(4.0), torch.arange(4.0)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(shards[1], torch.tensor([1.0, 2, 3, 4]))
        tangent = forward_ad.unpack_dual(gather_cp([shards[0], dual], TWO)).tangent
    assert tangent is not None
    assert tangent.tolist() == [0, 1, 2, 0, 0, 3, 4, 0]


def test_a_tangent_goes_through_the_exchange_of_ranks() -> None:
    logits, tangents = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    ids = torch.tensor([6, 1, 0, 3])

    def work(group: Group) -> tuple[Tensor, Tensor]:
        mine, moved = (each.chunk(2, -1)[group.rank] for each in (logits, tangents))
        dual = forward_ad.make_dual(mine, moved)
        mapped = map_teacher_logits_to_draft_vocab(dual, d2t_from_ids(ids), None, group)
        found = forward_ad.unpack_dual(mapped)
        assert found.tangent is not None
        return found.primal, found.tangent

    with forward_ad.dual_level():
        results = run_simulated(2, work)
    assert torch.equal(torch.cat([each[0] for each in results], -1), logits[..., ids])
    assert torch.equal(torch.cat([each[1] for each in results], -1), tangents[..., ids])


def test_the_exchange_and_its_transpose_have_forward_derivatives() -> None:
    """torch.func.jvp of the exchange, and of its gradient: of a linear map it is the map."""
    logits, moved = torch.randn(2, 8), torch.randn(2, 8)
    ids = torch.tensor([6, 1, 6])
    plan = ColumnPlan.of(ids, V_local=8, rank=0, size=1)

    def work(group: Group) -> None:
        def mapped(x: Tensor) -> Tensor:
            return exchange_columns(x, plan, group)

        def squares_gradient(x: Tensor) -> Tensor:
            found: Tensor = torch.func.grad(lambda y: (mapped(y) ** 2).sum() / 2)(x)
            return found

        values, tangent = torch.func.jvp(mapped, (logits,), (moved,))[:2]
        assert torch.equal(values, logits[:, ids])
        assert torch.equal(tangent, moved[:, ids])
        times = torch.tensor([0.0, 1, 0, 0, 0, 0, 2, 0])
        gradient, change = torch.func.jvp(squares_gradient, (logits,), (moved,))[:2]
        assert torch.equal(gradient, logits * times)
        assert torch.equal(change, moved * times)

    run_simulated(1, work)


@pytest.mark.parametrize("wants", ["backward", "forward"])
def test_ranks_of_which_some_want_a_derivative_are_refused_instead_of_hanging(wants: str) -> None:
    def work(group: Group) -> None:
        x = torch.ones(1, 2)
        if group.rank:
            x = (
                x.requires_grad_()
                if wants == "backward"
                else forward_ad.make_dual(x, torch.ones(1, 2))
            )
        map_teacher_logits_to_draft_vocab(x, torch.tensor([0, 0]), None, group)

    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match="rank 1 brings another need of a derivative than rank 0"),
    ):
        run_simulated(2, work)


def test_without_gradient_mode_what_a_tensor_requires_is_no_matter() -> None:
    def work(group: Group) -> Tensor:
        x = torch.full((1, 2), float(group.rank)).requires_grad_(group.rank == 1)
        with torch.no_grad():
            return map_teacher_logits_to_draft_vocab(x, torch.tensor([3, 0]), None, group)

    assert [each.tolist() for each in run_simulated(2, work)] == [[[1]], [[0]]]


@pytest.mark.parametrize(
    "packed",
    [
        lambda x: pack(x, PackedLayout.from_cu_seqlens((0, 2), (0, 8), cp_size=2), cp_rank=1),
        lambda x: pack_input_ids(x, (0, 2), (0, 8), 1, 2),
        lambda x: pack(x, PackedLayout.from_cu_seqlens((0, 0), (0, 8))),
        lambda x: pack_rolled_draft_token_mask(x, torch.ones(1), (0, 1), (0, 4)),
        lambda x: reconstruct_opd_full_teacher_logits(
            x[..., None].expand(1, 3, 3),
            teacher_payload="hidden_states",
            student_logits=torch.empty(1, 8, 2),
            vocab_parallel_rank=0,
            context_parallel_group=Rank1Of2(),
            teacher_output_layer_weight_by_index={0: HEAD},
        ),
    ],
)
def test_a_rank_whose_window_holds_no_token_stays_in_the_graph(
    packed: Callable[[Tensor], Tensor],
) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    found = packed(x)
    assert not found.any()
    assert found.requires_grad
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert grad.tolist() == [[0, 0, 0]]


class Rank1Of2:
    """A context-parallel group that only says its place."""

    rank, size = 1, 2

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        raise AssertionError("no exchange is wanted")

    def all_to_all(self, tensors: object) -> list[Tensor]:
        raise AssertionError("no exchange is wanted")


def test_the_gradient_of_the_draft_mask_reaches_both_masks() -> None:
    """d mask / d token_mask is the sample's weight where the token is in a slot: all but each
    sequence's first; d mask / d sample_mask the sum of its other tokens' weights."""
    tokens = torch.tensor([[5.0, 2, 3], [7, 4, 9]], requires_grad=True)
    samples = torch.tensor([2.0, 3.0], requires_grad=True)
    mask = pack_rolled_draft_token_mask(tokens, samples, (0, 3, 5), (0, 4, 8))
    assert mask.tolist() == [[4, 6, 0, 0, 12, 0, 0, 0]]
    upstream = torch.tensor([[1.0, 10, 100, 100, 1000, 100, 100, 100]])
    mask.backward(upstream)  # type: ignore[no-untyped-call]
    assert tokens.grad is not None
    assert tokens.grad.tolist() == [[0, 2, 20], [0, 3000, 0]]
    assert samples.grad is not None
    assert samples.grad.tolist() == [1 * 2 + 10 * 3, 1000 * 4]
