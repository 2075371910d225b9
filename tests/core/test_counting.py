"""Counting token ids piece by piece."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from opdtool.core import counting
from opdtool.core.counting import TokenCounter, total_of, trained
from opdtool.core.errors import InputError


@pytest.mark.parametrize("pending", [1, 7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_pieces_add_up_to_what_counting_one_by_one_finds(
    monkeypatch: pytest.MonkeyPatch, pending: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(counting, "PENDING", pending)
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (6, 11), generator=rng).to(dtype)
    keep = torch.rand(6, 11, generator=rng) < 0.6
    counter = TokenCounter(20)
    for start in range(0, 6, 2):
        counter.add(ids[start : start + 2], keep[start : start + 2])
    expected = Counter(int(ids[r, c]) for r in range(6) for c in range(11) if bool(keep[r, c]))
    assert 0 < sum(expected.values()) < ids.numel()
    assert counter.counts.tolist() == [expected[token] for token in range(20)]
    assert counter.counts.tolist() == [expected[token] for token in range(20)]  # asked again
    assert counter.outside == 0


def test_ids_outside_are_told_and_not_counted_and_only_where_they_would_count() -> None:
    counter = TokenCounter(5)
    ids = torch.tensor([[1, 5, -1], [-(2**63), 4, 2**63 - 1]])
    keep = torch.tensor([[True, True, False], [True, True, True]])
    counter.add(ids, keep, first_row=10)
    assert counter.counts.tolist() == [0, 1, 0, 0, 1]
    assert counter.outside == 3
    assert counter.strays == [(10, 1, 5), (11, 0, -(2**63)), (11, 2, 2**63 - 1)]


def test_only_the_first_strays_are_remembered() -> None:
    counter = TokenCounter(1)
    for _ in range(2):
        counter.add(torch.full((1, 8), 3), torch.ones(1, 8, dtype=torch.bool))
    assert counter.outside == 16
    assert len(counter.strays) == 10


def test_trained_tokens_are_real_and_have_a_weight_in_both_masks() -> None:
    token_mask = torch.tensor([[0.5, 0.0, 1.0], [1.0, 1.0, 1.0], [-1.0, 1.0, 1.0]])
    keep = trained(token_mask, torch.tensor([1.0, 0.0, 2.0]), torch.tensor([3, 3, 2]), 3)
    assert keep.tolist() == [[True, False, True], [False] * 3, [True, True, False]]
    everything = trained(None, None, torch.tensor([3, 0, 2]), 3)
    assert everything.tolist() == [[True] * 3, [False] * 3, [True, True, False]]


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="vocabulary of 0 ids"):
        TokenCounter(0)


@pytest.mark.parametrize("stray", [-1, 5])
def test_one_id_just_outside_is_found_and_the_first_and_last_are_counted(stray: int) -> None:
    counter = TokenCounter(5)
    ids = torch.tensor([[0, stray, 4, 0]])
    counter.add(ids, torch.ones(1, 4, dtype=torch.bool))
    assert counter.counts.tolist() == [2, 0, 0, 0, 1]
    assert counter.outside == 1
    assert counter.strays == [(0, 1, stray)]


def test_where_nothing_is_kept_nothing_is_counted() -> None:
    counter = TokenCounter(5)
    counter.add(torch.tensor([[1, 9]]), torch.zeros(1, 2, dtype=torch.bool))
    counter.add(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.bool))
    assert counter.counts.tolist() == [0] * 5
    assert counter.outside == 0


def test_a_total_is_exact_past_int64() -> None:
    for counts in ([2**63 - 1] * 5, [2**62, 2**62, 1], [2**32 - 1, 2**32, 2**32 + 1], [0, 7]):
        assert total_of(torch.tensor(counts)) == sum(counts)
    assert total_of(torch.tensor([0.25, 0.5], dtype=torch.float64)) == 0.75


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_ids_outside_are_told_too(dtype: torch.dtype) -> None:
    counter = TokenCounter(5)
    counter.add(torch.tensor([[0, 200, 4, 4]]).to(dtype), torch.ones(1, 4, dtype=torch.bool))
    assert counter.counts.tolist() == [1, 0, 0, 0, 2]
    assert counter.strays == [(0, 1, 200)]


def test_ids_past_int64_are_told_as_they_are() -> None:
    counter = TokenCounter(5)
    ids = torch.from_numpy(np.array([[2**64 - 1, 3]], np.uint64))
    counter.add(ids, torch.ones(1, 2, dtype=torch.bool))
    assert counter.counts.tolist() == [0, 0, 0, 1, 0]
    assert counter.strays == [(0, 0, 2**64 - 1)]
