"""The draft vocabulary's maps and choice, and the mapping of teacher logits on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opdtool.core.errors import InputError
from opdtool.core.vocab import (
    choose_draft_vocab,
    coverage,
    d2t_from_ids,
    ids_from_d2t,
    map_teacher_logits_to_draft_vocab,
    t2d_from_d2t,
    t2d_from_ids,
)
from tests.reference import vocab as slow

D2T = [1, 1, 3, 4]  # draft ids 0 1 2 3 stand for 1 2 5 7
IDS = [1, 2, 5, 7]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def test_offsets_and_ids_are_two_writings_of_one_map() -> None:
    assert ids_from_d2t(torch.tensor(D2T)).tolist() == IDS
    assert d2t_from_ids(torch.tensor(IDS)).tolist() == D2T
    assert t2d_from_d2t(torch.tensor(D2T), 8).tolist() == [i in IDS for i in range(8)]
    assert t2d_from_ids(torch.tensor(IDS), 8).sum().item() == 4


def test_a_map_in_frequency_order_keeps_its_order() -> None:
    ids = torch.tensor([7, 0, 3])
    assert d2t_from_ids(ids).tolist() == [7, -1, 1]
    assert ids_from_d2t(torch.tensor([7, -1, 1])).tolist() == [7, 0, 3]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_narrow_map_does_not_overflow(dtype: torch.dtype) -> None:
    d2t = torch.full((300,), 100, dtype=dtype)
    assert torch.iinfo(dtype).max < 299 + 100
    assert ids_from_d2t(d2t, 400).tolist() == list(range(100, 400))


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (torch.tensor([0, -2]), r"d2t\[1\] is -2, so draft id 1 stands for target id -1"),
        (torch.tensor([0, 7]), r"d2t\[1\] is 7, so draft id 1 stands for target id 8, .* 0..7"),
        (torch.tensor([[0]]), r"d2t has shape \[1, 1\]"),
        (torch.tensor([], dtype=torch.int64), r"d2t has shape \[0\]"),
        (torch.tensor([0.0]), r"d2t is torch.float32"),
        (torch.tensor([True]), r"d2t is torch.bool"),
    ],
)
def test_a_map_that_is_none_is_refused_by_entry(d2t: torch.Tensor, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ids_from_d2t(d2t, 8)
    with pytest.raises(ValueError, match=said):
        map_teacher_logits_to_draft_vocab(torch.zeros(1, 1, 8), d2t)


def test_unsigned_values_past_int64_are_refused_and_not_wrapped() -> None:
    huge = torch.tensor([-1], dtype=torch.int64).view(torch.uint64)
    with pytest.raises(InputError, match="unsigned values past int64"):
        ids_from_d2t(huge, 8)


def test_the_extremes_of_int64_are_outside_every_vocabulary() -> None:
    for value in (2**63 - 1, -(2**63)):
        with pytest.raises(InputError, match="outside the vocabulary"):
            ids_from_d2t(torch.tensor([0, value]), 8)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_column_i_of_the_result_is_teacher_column_i_plus_offset(dtype: torch.dtype) -> None:
    logits = torch.arange(2 * 3 * 8, dtype=torch.float32).reshape(2, 3, 8)
    got = map_teacher_logits_to_draft_vocab(logits, torch.tensor(D2T, dtype=dtype))
    assert got[0, 0].tolist() == [1.0, 2.0, 5.0, 7.0]
    assert got[1, 2].tolist() == [41.0, 42.0, 45.0, 47.0]
    assert got.shape == (2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_dtype_is_kept_and_no_value_changes(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 8).to(dtype)
    got = map_teacher_logits_to_draft_vocab(logits, torch.tensor(D2T))
    assert got.dtype == dtype
    assert torch.equal(got, logits[..., IDS])


def test_without_a_map_the_input_itself_comes_back() -> None:
    logits = torch.zeros(1, 1, 8)
    assert map_teacher_logits_to_draft_vocab(logits, None) is logits
    assert map_teacher_logits_to_draft_vocab(logits, None, 3, object()) is logits


def test_a_duplicated_target_gathers_the_gradients_of_both() -> None:
    logits = torch.zeros(1, 1, 4, requires_grad=True)
    got = map_teacher_logits_to_draft_vocab(logits, torch.tensor([2, 1, 0]))  # 2 2 2
    (grad,) = torch.autograd.grad(got, logits, torch.tensor([[[1.0, 10.0, 100.0]]]))
    assert grad.tolist() == [[[0.0, 0.0, 111.0, 0.0]]]


def test_the_gradient_is_that_of_the_slow_reference() -> None:
    logits = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 4, dtype=torch.float64)
    got = map_teacher_logits_to_draft_vocab(logits, torch.tensor(D2T))
    (grad,) = torch.autograd.grad(got, logits, upstream)
    np.testing.assert_array_equal(grad.numpy(), slow.mapped_gradient(upstream.numpy(), D2T, 8))


def test_rank_0_without_a_group_has_the_whole_vocabulary_and_another_rank_is_refused() -> None:
    logits, d2t = torch.randn(1, 1, 8), torch.tensor(D2T)
    expected = logits[..., IDS]
    assert torch.equal(map_teacher_logits_to_draft_vocab(logits, d2t, 0), expected)
    with pytest.raises(ValueError, match="vocab_parallel_rank is 1 but there is no"):
        map_teacher_logits_to_draft_vocab(logits, d2t, 1)


def test_a_foreign_group_is_asked_through_torch_distributed_when_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign = object()
    asked: list[str] = []

    def answer(name: str, value: int) -> Any:
        def ask(group: object) -> int:
            assert group is foreign
            asked.append(name)
            return value

        return ask

    monkeypatch.setattr(torch.distributed, "get_rank", answer("rank", 0))
    monkeypatch.setattr(torch.distributed, "get_world_size", answer("size", 1))
    logits = torch.randn(1, 2, 8)
    got = map_teacher_logits_to_draft_vocab(logits, torch.tensor(D2T), vocab_parallel_group=foreign)
    assert torch.equal(got, logits[..., IDS])
    assert asked == ["rank", "size"]


def test_a_group_that_knows_no_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, d2t = torch.randn(1, 1, 8), torch.tensor(D2T)
    with pytest.raises(ValueError, match="cannot be asked for its rank"):
        map_teacher_logits_to_draft_vocab(logits, d2t, None, object())
    with pytest.raises(ValueError, match="cannot be asked for its size"):
        map_teacher_logits_to_draft_vocab(logits, d2t, 0, object())
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: -1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: -1)
    with pytest.raises(ValueError, match="not in vocab_parallel_group"):
        map_teacher_logits_to_draft_vocab(logits, d2t, None, object())
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match="is 0, but the group says rank 1 of 2"):
        map_teacher_logits_to_draft_vocab(logits, d2t, 0, object())


def test_the_most_frequent_ids_are_chosen_ties_to_the_lower_and_filled_from_the_lowest() -> None:
    counts = torch.tensor([0, 5, 0, 9, 5, 5, 0, 1])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 3, 4]  # 9, then the first two 5s
    assert choose_draft_vocab(counts, 6).tolist() == [0, 1, 3, 4, 5, 7]  # 0 fills up
    assert choose_draft_vocab(counts, 8).tolist() == list(range(8))


def test_required_ids_are_in_whatever_their_counts() -> None:
    counts = torch.tensor([0, 5, 0, 9, 5, 5, 0, 1])
    assert choose_draft_vocab(counts, 3, [6, 2, 6]).tolist() == [2, 3, 6]
    assert choose_draft_vocab(counts, 1, [0]).tolist() == [0]
    with pytest.raises(InputError, match=r"required id 8 is outside the vocabulary 0..7"):
        choose_draft_vocab(counts, 3, [8])
    with pytest.raises(InputError, match="required id -1 is outside"):
        choose_draft_vocab(counts, 3, [-1])
    with pytest.raises(InputError, match="2 ids are required but the draft vocabulary has 1"):
        choose_draft_vocab(counts, 1, [0, 1])
    for size in (0, 9):
        with pytest.raises(InputError, match=f"draft vocabulary of {size} ids cannot"):
            choose_draft_vocab(counts, size)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 40))
def test_the_choice_is_that_of_counting_and_sorting(data: st.DataObject, vocab: int) -> None:
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), max_size=200))
    size = data.draw(st.integers(1, vocab))
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab)
    chosen = choose_draft_vocab(counts, size)
    assert chosen.tolist() == slow.most_frequent(tokens, vocab, size)
    assert len(chosen) == size


def test_coverage_is_the_share_of_counted_tokens_that_is_kept() -> None:
    counts = torch.tensor([1, 5, 0, 4])
    assert coverage(counts, torch.tensor([1])) == 0.5
    assert coverage(counts, torch.tensor([0, 1, 2, 3])) == 1.0
    assert coverage(counts, torch.tensor([2])) == 0.0
    assert np.isnan(coverage(torch.zeros(4), torch.tensor([2])))


def test_a_scalar_is_no_logits() -> None:
    with pytest.raises(InputError, match="teacher_logits is a scalar"):
        map_teacher_logits_to_draft_vocab(torch.tensor(1.0), torch.tensor([0]))


@pytest.mark.parametrize(
    ("required", "stray"), [([0, 4], 4), ([-1, 0], -1), ([-3, 9], -3), ([1, 2, 4, 7], 4)]
)
def test_the_first_required_id_outside_the_vocabulary_is_named(
    required: list[int], stray: int
) -> None:
    counts = torch.tensor([0, 5, 6, 7])
    with pytest.raises(InputError, match=rf"required id {stray} is outside the vocabulary 0\.\.3"):
        choose_draft_vocab(counts, 2, required)
    assert choose_draft_vocab(counts, 2, [0, 3]).tolist() == [0, 3]


def test_an_unsigned_map_may_hold_zeros() -> None:
    assert ids_from_d2t(torch.tensor([0, 0, 1]).to(torch.uint64), 5).tolist() == [0, 1, 3]
