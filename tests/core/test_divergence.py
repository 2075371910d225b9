"""Divergences over vocabulary slices are those of the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.core import divergence
from opdtool.core.divergence import Divergences, DivergenceSums, SoftmaxSums, chunked_divergences
from opdtool.core.errors import InputError


def log_softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    total = math.log(math.fsum(math.exp(x - peak) for x in logits)) + peak
    return [x - total for x in logits]


def slow(teacher: Tensor, student: Tensor) -> np.ndarray:
    """[P, 4]: forward, reverse, teacher's entropy, student's entropy, term by term."""
    rows = []
    for t_row, s_row in zip(teacher.tolist(), student.tolist(), strict=True):
        p, q = log_softmax(t_row), log_softmax(s_row)
        rows.append(
            [
                math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)),
                math.fsum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True)),
                -math.fsum(math.exp(a) * a for a in p),
                -math.fsum(math.exp(b) * b for b in q),
            ]
        )
    return np.array(rows)


def stacked(found: Divergences) -> np.ndarray:
    parts = (found.forward, found.reverse, found.teacher_entropy, found.student_entropy)
    return torch.stack(parts, dim=-1).double().numpy()


def pair(positions: int = 7, columns: int = 23, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(positions, columns, generator=made) * 4,
        torch.randn(positions, columns, generator=made) * 4,
    )


def test_two_columns_worked_by_hand() -> None:
    # p = (3/4, 1/4), q = (1/2, 1/2)
    found = chunked_divergences(
        torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([[5.0, 5.0]]), vocab_slice=1
    )
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    want = [[forward, reverse, entropy, math.log(2.0)]]
    assert forward != pytest.approx(reverse, abs=1e-3)
    assert np.allclose(stacked(found), want, atol=1e-6)


@pytest.mark.parametrize("vocab_slice", [1, 5, 23, 100])
def test_slices_of_the_vocabulary_change_nothing(vocab_slice: int) -> None:
    teacher, student = pair()
    found = chunked_divergences(teacher, student, vocab_slice=vocab_slice)
    assert np.allclose(stacked(found), slow(teacher, student), rtol=1e-5, atol=2e-6)


def test_leading_dimensions_are_kept() -> None:
    teacher, student = pair(6)
    found = chunked_divergences(teacher.view(2, 3, -1), student.view(2, 3, -1))
    assert found.forward.shape == (2, 3)
    assert np.allclose(stacked(found).reshape(6, 4), slow(teacher, student), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_distils_itself_diverges_by_nothing(dtype: torch.dtype) -> None:
    logits = (pair(64, 500)[0] * 3).to(dtype)
    found = chunked_divergences(logits, logits, vocab_slice=37)
    assert found.teacher_entropy.min() > 0
    assert found.forward.max() < 1e-6
    assert found.reverse.max() < 1e-6
    assert torch.equal(found.teacher_entropy, found.student_entropy)


def test_a_constant_added_to_all_logits_changes_nothing_that_float32_can_show() -> None:
    teacher, student = pair()
    far = chunked_divergences(teacher + 512.0, student - 512.0, vocab_slice=4)
    assert np.allclose(stacked(far), slow(teacher, student), rtol=1e-3, atol=1e-3)


def test_logits_as_large_as_float32_holds_do_not_overflow() -> None:
    teacher = torch.tensor([[3e38, -3e38, 0.0]])
    found = chunked_divergences(teacher, teacher, vocab_slice=1)
    assert found.forward.tolist() == [0.0]
    assert found.teacher_entropy.tolist() == [0.0]


@pytest.mark.parametrize("vocab_slice", [1, 2, 4])
def test_columns_that_neither_distribution_holds_drop_out(vocab_slice: int) -> None:
    teacher, student = pair(5, 4)
    masked_t, masked_s = teacher.clone(), student.clone()
    masked_t[:, [0, 2]] = -torch.inf
    masked_s[:, [0, 2]] = -torch.inf
    found = chunked_divergences(masked_t, masked_s, vocab_slice=vocab_slice)
    want = slow(teacher[:, [1, 3]], student[:, [1, 3]])
    assert np.allclose(stacked(found), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("vocab_slice", [1, 2, 4])
def test_a_token_that_only_one_of_them_can_say_diverges_without_bound(vocab_slice: int) -> None:
    teacher, student = pair(5, 4)
    student[:, 1] = -torch.inf
    found = chunked_divergences(teacher, student, vocab_slice=vocab_slice)
    assert found.forward.isposinf().all()
    kept = [0, 2, 3]
    # What the student never says counts for nothing in KL(student || teacher): only the
    # teacher's own normaliser still takes it in.
    p = torch.log_softmax(teacher, dim=-1)[:, kept]
    q = torch.log_softmax(student[:, kept], dim=-1)
    assert torch.allclose(found.reverse, (q.exp() * (q - p)).sum(-1), atol=1e-5)


def test_shards_merge_in_any_order() -> None:
    teacher, student = pair()
    cuts = [slice(0, 4), slice(4, 11), slice(11, 23)]
    for order in ([0, 1, 2], [2, 0, 1]):
        whole = DivergenceSums(7)
        for number in order:
            part = DivergenceSums(7)
            part.add(slice(None), teacher[:, cuts[number]], student[:, cuts[number]])
            whole.merge(part)
        assert np.allclose(stacked(whole.result()), slow(teacher, student), rtol=1e-5, atol=2e-6)


def test_sums_travel_as_one_tensor() -> None:
    teacher, student = pair()
    sums = SoftmaxSums(7)
    sums.add(slice(None), teacher, ahead=teacher - student, entropy=True)
    again = SoftmaxSums.of_tensor(sums.tensor())
    for name in SoftmaxSums.__slots__:
        assert torch.equal(getattr(sums, name), getattr(again, name))


class ThreadGroup:
    """Ranks as threads that meet at a barrier: just enough of a group for an all-gather."""

    def __init__(self, rank: int, board: list[Tensor | None], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait(10)
        return [t for t in self._board if t is not None]

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        raise AssertionError("not wanted")


def test_every_rank_of_a_group_has_the_divergence_of_the_whole_vocabulary() -> None:
    teacher, student = pair(5, 24)
    board: list[Tensor | None] = [None] * 4
    barrier = Barrier(4)
    results: dict[int, np.ndarray] = {}

    def work(rank: int) -> None:
        mine = slice(rank * 6, rank * 6 + 6)
        group = ThreadGroup(rank, board, barrier)
        found = chunked_divergences(
            teacher[:, mine], student[:, mine], vocab_slice=4, vocab_parallel_group=group
        )
        results[rank] = stacked(found)

    threads = [Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = stacked(chunked_divergences(teacher[:, :6], student[:, :6]))
    assert not np.allclose(alone, slow(teacher, student), atol=1e-2)
    for rank in range(4):
        assert np.allclose(results[rank], slow(teacher, student), rtol=1e-5, atol=2e-6)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"\[2, 4\] and student_logits \[2, 3\]"):
        chunked_divergences(torch.zeros(2, 4), torch.zeros(2, 3))


@pytest.mark.parametrize("vocab_slice", [1, 3, 8192])
def test_a_row_with_columns_that_cannot_be_said_leaves_the_other_rows_right(
    vocab_slice: int,
) -> None:
    teacher, student = pair(positions=2, columns=3)
    teacher[1, 2] = student[1, 2] = -torch.inf
    found = stacked(chunked_divergences(teacher, student, vocab_slice=vocab_slice))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:1], slow(teacher[:1], student[:1]), rtol=1e-5, atol=1e-6)
    short = slow(teacher[1:, :2], student[1:, :2])
    np.testing.assert_allclose(found[1:], short, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tile", [1, 50, 100])
def test_positions_taken_a_few_at_a_time_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    monkeypatch.setattr(divergence, "TILE", tile)
    teacher, student = pair(positions=7, columns=23)
    found = stacked(chunked_divergences(teacher, student, vocab_slice=10))
    np.testing.assert_allclose(found, slow(teacher, student), rtol=1e-5, atol=1e-6)
    # Also where the positions are the later ones of more.
    sums = DivergenceSums(9)
    sums.add(slice(2, 9), teacher, student)
    np.testing.assert_allclose(
        stacked(sums.result())[2:], slow(teacher, student), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("vocab_slice", [1, 2, 3])
def test_what_a_distribution_can_not_say_diverges_however_the_vocabulary_is_cut(
    vocab_slice: int,
) -> None:
    # exp(0 - 200) is nothing to float32, but it is not nothing.
    teacher = torch.tensor([[0.0, 1.0, 200.0], [0.0, -torch.inf, 1.0]])
    student = torch.tensor([[-torch.inf, 1.0, 200.0], [0.0, -torch.inf, 1.0]])
    found = chunked_divergences(teacher, student, vocab_slice=vocab_slice)
    assert found.forward.tolist() == [torch.inf, 0.0]
    assert found.reverse[0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("offset", [0.0, 20.0, -3000.0])
def test_small_divergences_of_large_logits_are_not_lost_in_rounding(offset: float) -> None:
    made = torch.Generator().manual_seed(8)
    teacher = (3 * torch.randn(64, 2000, generator=made) + offset).double()
    student = teacher + 1e-3 * torch.randn(64, 2000, generator=made)
    teacher, student = teacher.float(), student.float()
    found = chunked_divergences(teacher, student, vocab_slice=512).forward.double()
    p, q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    right = (p.exp() * (p - q)).sum(-1)
    assert 1e-7 < float(right.mean()) < 1e-6 or offset == -3000.0
    assert float((found - right).abs().max()) < 1e-6
    assert float(found.mean()) == pytest.approx(float(right.mean()), rel=0.3)
