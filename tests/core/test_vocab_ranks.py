"""The mapping under tensor parallelism: same columns, same gradients, little traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.group import Group
from opdtool.core.vocab import d2t_from_ids, map_teacher_logits_to_draft_vocab
from opdtool.ranks.simulated import SimulatedGroup, run_simulated
from tests.ranks.workers import run_gloo
from tests.reference import vocab as slow

SIZES = [1, 2, 4, 8]


def mapped_by_ranks(
    logits: Tensor, d2t: Tensor, size: int, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The draft shards of all ranks side by side, and the gradient shards likewise."""

    def work(group: SimulatedGroup) -> tuple[Tensor, Tensor | None]:
        shard = logits.chunk(size, dim=-1)[group.rank].detach().clone().requires_grad_()
        out = map_teacher_logits_to_draft_vocab(shard, d2t, group.rank, group)
        if upstream is None:
            return out.detach(), None
        mine = upstream.chunk(size, dim=-1)[group.rank]
        return out.detach(), torch.autograd.grad(out, shard, mine)[0]

    results = run_simulated(size, work)
    gradients = [grad for _, grad in results if grad is not None]
    return (
        torch.cat([out for out, _ in results], dim=-1),
        torch.cat(gradients, dim=-1) if gradients else None,
    )


@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    draft_local=st.integers(1, 5),
    vocab_local=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["any", "ascending", "duplicates"]),
)
def test_shards_side_by_side_are_plain_indexing_and_so_is_the_gradient(
    size: int, draft_local: int, vocab_local: int, seed: int, kind: str
) -> None:
    V, D = vocab_local * size, draft_local * size
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (D,), generator=rng)
    if kind == "ascending":
        ids = ids.sort().values
    if kind == "duplicates":
        ids = ids[:1].expand(D)
    d2t = d2t_from_ids(ids)
    logits = torch.randn(2, 3, V, dtype=torch.float64, generator=rng)
    upstream = torch.randn(2, 3, D, dtype=torch.float64, generator=rng)
    out, grad = mapped_by_ranks(logits, d2t, size, upstream)
    assert grad is not None
    assert out.shape == (2, 3, D)
    np.testing.assert_array_equal(out.numpy(), slow.mapped(logits.numpy(), d2t.tolist()))
    np.testing.assert_allclose(
        grad.numpy(), slow.mapped_gradient(upstream.numpy(), d2t.tolist(), V), rtol=1e-12
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_vocabulary_is_mapped_to_the_bit(size: int, dtype: torch.dtype) -> None:
    V, D = 151_936, 32_000
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(size))[:D].sort().values
    logits = torch.randn(1, 3, V).to(dtype)
    upstream = torch.randn(1, 3, D).to(dtype)
    out, grad = mapped_by_ranks(logits, d2t_from_ids(ids), size, upstream)
    plain = logits.clone().requires_grad_()
    expected = torch.autograd.grad(plain[..., ids], plain, upstream)[0]
    assert out.dtype == dtype
    assert torch.equal(out, logits[..., ids])
    assert grad is not None
    assert torch.equal(grad, expected)


class AllRanks(torch.autograd.Function):
    """All ranks' shards of a whole tensor mapped in one call, so that gradcheck can try it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, d2t: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(logits, d2t)
        ctx.size = size
        return mapped_by_ranks(logits, d2t, size)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        logits, d2t = ctx.saved_tensors
        with torch.enable_grad():
            return mapped_by_ranks(logits, d2t, ctx.size, grads[0])[1], None, None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_is_the_numerical_derivative(size: int) -> None:
    logits = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    d2t = d2t_from_ids(torch.tensor([7, 2, 2, 0]))
    assert torch.autograd.gradcheck(
        lambda x: AllRanks.apply(x, d2t, size),  # type: ignore[no-untyped-call]
        (logits,),
    )


def test_the_exchange_can_be_differentiated_twice() -> None:
    def work(group: SimulatedGroup) -> Tensor:
        shard = (torch.arange(4.0) + 4 * group.rank).requires_grad_()
        d2t = d2t_from_ids(torch.tensor([1, 6]))
        out = map_teacher_logits_to_draft_vocab(shard, d2t, None, group)
        (first,) = torch.autograd.grad((out**3).sum(), shard, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), shard)
        return second

    assert torch.cat(run_simulated(2, work)).tolist() == [0, 6, 0, 0, 0, 0, 36, 0]  # 6 x


class Counting:
    """A group that counts what reaches it from other ranks, and from itself."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.from_others = 0
        self.in_all = 0
        self.calls: list[str] = []

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.calls.append(f"all_gather of {tensor.numel()}")
        return self._group.all_gather(tensor)

    def all_to_all(
        self, tensors: Sequence[Tensor], widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        received = self._group.all_to_all(tensors, widths)
        self.calls.append("all_to_all")
        self.in_all += sum(each.numel() for each in received)
        self.from_others += sum(
            each.numel() for rank, each in enumerate(received) if rank != self.rank
        )
        return received


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_more_than_its_share_of_the_draft_columns_reaches_a_rank(size: int) -> None:
    B, S, V, D = 2, 3, 1024, 256
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:D]

    def work(group: SimulatedGroup) -> Counting:
        counting = Counting(group)
        shard = torch.randn(B, S, V // size)
        map_teacher_logits_to_draft_vocab(shard, d2t_from_ids(ids), None, counting)
        return counting

    for counting in run_simulated(size, work):
        assert counting.calls == ["all_gather of 7", "all_to_all"]
        assert 0 < counting.from_others <= counting.in_all == B * S * D // size


def test_columns_that_arrive_out_of_order_behind_the_first_are_put_in_their_places() -> None:
    # Rank 0 of 2 wants 1 and 2 of its own and 5 of the other's, which comes between them.
    ids = torch.tensor([1, 5, 2, 4, 0, 6])
    logits = torch.arange(8.0).reshape(1, 8)
    got, _ = mapped_by_ranks(logits, d2t_from_ids(ids), 2)
    assert got.tolist() == [[1, 5, 2, 4, 0, 6]]


def test_columns_that_a_rank_owns_itself_cross_to_no_other() -> None:
    ids = torch.arange(16)  # V 16, D 16: every rank wants just what it has

    def work(group: SimulatedGroup) -> int:
        counting = Counting(group)
        map_teacher_logits_to_draft_vocab(torch.randn(1, 4), d2t_from_ids(ids), None, counting)
        return counting.from_others

    assert run_simulated(4, work) == [0, 0, 0, 0]


def refused(size: int, V_local: Sequence[int], d2t: Sequence[Sequence[float]]) -> str:
    def work(group: SimulatedGroup) -> None:
        r = group.rank
        map_teacher_logits_to_draft_vocab(
            torch.zeros(1, V_local[r]), torch.tensor(d2t[r]), None, group
        )

    with pytest.raises(ValueError, match="rank") as caught:
        run_simulated(size, work)
    return str(caught.value)


def test_a_draft_vocabulary_that_does_not_divide_is_refused_with_the_remainder() -> None:
    said = refused(2, [4, 4], [[0, 0, 0]] * 2)
    assert "draft vocabulary of 3 does not divide by tensor-parallel size 2: 1 left over" in said
    assert said.endswith("pad it to 4")
    assert refused(4, [2] * 4, [[0] * 6] * 4).endswith("2 left over; pad it to 8")


def test_shards_of_a_vocabulary_that_does_not_divide_are_refused_with_the_remainder() -> None:
    said = refused(2, [4, 3], [[0, 0]] * 2)
    assert "the vocabulary of 7 does not divide by tensor-parallel size 2: 1 left over" in said
    assert "shards of [5, 3] columns" in refused(2, [5, 3], [[0, 0]] * 2)


def test_a_target_outside_the_whole_vocabulary_is_refused_by_entry() -> None:
    assert "d2t[1] is 7, so draft id 1 stands for target id 8" in refused(2, [4, 4], [[0, 7]] * 2)
    assert "stands for target id -1" in refused(2, [4, 4], [[-1, 0]] * 2)


def test_ranks_with_different_maps_are_refused_instead_of_mixing_columns() -> None:
    assert "rank 1 brings another d2t" in refused(2, [4, 4], [[0, 0], [0, 1]])
    assert "rank 1 brings another length of d2t" in refused(2, [4, 4], [[0, 0], [0, 0, 0, 0]])
    assert "rank 1 brings another dtype of d2t" in refused(2, [4, 4], [[0, 0], [0.0, 0.0]])


def test_a_map_of_other_dimensions_is_another_map_though_its_entries_are_the_same() -> None:
    d2t: Any = [[0, 0], [[0, 0]]]
    assert "rank 1 brings another length of d2t" in refused(2, [4, 4], d2t)


def test_maps_of_one_content_in_different_integer_dtypes_agree() -> None:
    def work(group: SimulatedGroup) -> list[list[float]]:
        d2t = torch.tensor([1, 2], dtype=(torch.int32, torch.int64)[group.rank])
        shard = torch.arange(2.0).reshape(1, 2) + 2 * group.rank
        return map_teacher_logits_to_draft_vocab(shard, d2t, None, group).tolist()

    assert run_simulated(2, work) == [[[1.0]], [[3.0]]]


def in_a_process() -> dict[str, Any]:
    """One gloo rank's forward and backward pass, on the bare process group."""
    world: Any = torch.distributed.group.WORLD
    rank, size = world.rank(), world.size()
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, 64, generator=rng)
    ids = torch.randint(0, 64, (16,), generator=rng)
    upstream = torch.randn(2, 5, 16, generator=rng)
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        shard = logits.to(dtype).chunk(size, -1)[rank].clone().requires_grad_()
        mapped = map_teacher_logits_to_draft_vocab(shard, d2t_from_ids(ids), rank, world)
        mine = upstream.to(dtype).chunk(size, -1)[rank]
        out[str(dtype)] = (mapped.detach(), torch.autograd.grad(mapped, shard, mine)[0])
    try:
        map_teacher_logits_to_draft_vocab(shard, torch.tensor([0, 100 * rank]), None, world)
    except InputError as error:
        out["refused"] = str(error)
    return out


def test_gloo_processes_map_as_plain_indexing_does_forward_and_backward(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, 64, generator=rng)
    ids = torch.randint(0, 64, (16,), generator=rng)
    upstream = torch.randn(2, 5, 16, generator=rng)
    results = run_gloo(2, in_a_process, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        plain = logits.to(dtype).clone().requires_grad_()
        expected = plain[..., ids]
        expected_grad = torch.autograd.grad(expected, plain, upstream.to(dtype))[0]
        out = torch.cat([each[str(dtype)][0] for each in results], -1)
        grad = torch.cat([each[str(dtype)][1] for each in results], -1)
        assert torch.equal(out, expected.detach())
        torch.testing.assert_close(grad, expected_grad)
    assert all("another d2t" in each["refused"] for each in results)


class Foreign:
    """A group of somebody else's: opdtool knows nothing of it but what torch.distributed says."""

    def __init__(self, inner: SimulatedGroup) -> None:
        self.inner = inner


def test_a_foreign_group_exchanges_through_torch_distributed_when_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns: list[int] = []

    def all_gather(received: list[Tensor], tensor: Tensor, group: Foreign) -> None:
        for place, each in zip(received, group.inner.all_gather(tensor), strict=True):
            place.copy_(each)

    def all_to_all_single(
        received: Tensor,
        sent: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: Foreign,
    ) -> None:
        columns.append(received.numel() // 6)
        pieces = group.inner.all_to_all(torch.split(sent, input_split_sizes))
        assert [piece.numel() for piece in pieces] == output_split_sizes
        received.copy_(torch.cat(pieces))

    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.inner.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.inner.size)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all_single)
    logits = torch.randn(2, 3, 16)
    ids = torch.tensor([15, 2, 8, 9, 3, 3, 0, 12])

    def work(group: SimulatedGroup) -> tuple[Tensor, Tensor]:
        shard = logits.chunk(4, -1)[group.rank].clone().requires_grad_()
        out = map_teacher_logits_to_draft_vocab(shard, d2t_from_ids(ids), None, Foreign(group))
        return out.detach(), torch.autograd.grad(out.sum(), shard)[0]

    results = run_simulated(4, work)
    assert torch.equal(torch.cat([out for out, _ in results], -1), logits[..., ids])
    grad = torch.cat([grad for _, grad in results], -1)
    assert grad[0, 0].tolist() == [1, 0, 1, 2, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1]
    assert columns[:4] == [2, 2, 2, 2]  # D / TP columns to each rank, its own included
