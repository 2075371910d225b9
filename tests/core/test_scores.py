"""Log-probabilities of single tokens, and how far logits that are a little off may move them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from opdtool.core.bounds import EPS, ErrorBound, RowsAndColumns, derived_bound
from opdtool.core.scores import TokenScores

NONE = RowsAndColumns()


def scores_of(
    logits: torch.Tensor,
    tokens: list[int],
    bound: ErrorBound,
    norms: RowsAndColumns = NONE,
    width: int = 1000,
) -> TokenScores:
    scores = TokenScores(torch.tensor(tokens), bound, "cpu")
    for low in range(0, logits.shape[1], width):
        columns = slice(low, low + width)
        some = norms
        if norms.columns is not None:
            assert norms.columns4 is not None
            some = RowsAndColumns(
                rows=norms.rows,
                columns=norms.columns[columns],
                rows4=norms.rows4,
                columns4=norms.columns4[columns],
            )
        scores.add(0, low, logits[:, columns], some)
    return scores


def test_log_probabilities_worked_by_hand() -> None:
    logits = torch.tensor([[1.0, 3.0, 4.0], [2.0, 2.0, 4.0], [1.0, 1.0, 2.0]]).log()
    scores = scores_of(logits, [1, 0, -1], ErrorBound(), width=2)
    want = np.log([3 / 8, 2 / 8])
    np.testing.assert_allclose(scores.log_probs[:2].numpy(), want, rtol=1e-6)
    assert scores.log_probs[2].isnan()
    # Nothing but float32's own rounding is allowed where the logits are exact.
    assert 8 * EPS < float(scores.allowed[:2].min()) <= float(scores.allowed[:2].max()) < 32 * EPS


def test_what_is_allowed_worked_by_hand() -> None:
    # Logits 0 and log 3 may be off by 0.01 each; the token has probability 1/4. At the worst
    # its own goes down and the other up: log(1/4 + 3/4 exp(0.02)).
    bound = ErrorBound(absolute=0.01)
    scores = scores_of(torch.tensor([[1.0, 3.0]]).log(), [0], bound)
    assert float(scores.allowed) == pytest.approx(np.log(0.25 + 0.75 * np.exp(0.02)), abs=2e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.3])
def test_no_error_within_the_bound_moves_a_log_probability_further(seed: int, size: float) -> None:
    made = np.random.default_rng(seed)
    P, V, spread = 5, 40, float(made.choice([0.5, 3.0, 12.0]))
    logits = made.normal(size=(P, V)) * spread
    tokens = made.integers(0, V, P)
    tokens[0] = logits[0].argmax()
    bound = ErrorBound(relative=size / 3, accumulation=size / 5, operand=size / 7, absolute=size)
    rows, columns = made.uniform(0, 2, (2, P)), made.uniform(0, 2, (2, V))
    norms = RowsAndColumns(
        rows=torch.from_numpy(rows[0]).float(),
        columns=torch.from_numpy(columns[0]).float(),
        rows4=torch.from_numpy(rows[1]).float(),
        columns4=torch.from_numpy(columns[1]).float(),
    )
    scores = scores_of(torch.from_numpy(logits).float(), tokens.tolist(), bound, norms, width=7)
    products = bound.accumulation * np.outer(rows[0], columns[0])
    products += bound.operand * np.outer(rows[1], columns[1])
    own = np.arange(P), tokens
    right = log_probs(logits)[own]
    most = np.zeros(P)
    for sign in (1, -1, 0):
        for _ in range(1 if sign else 40):
            # |d| <= relative * |recorded| + ..., the recorded logit being off already.
            off = products + bound.absolute
            way = np.full((P, V), float(sign)) if sign else made.choice([-1.0, 1.0], (P, V))
            way[own] = -way[own] if sign else way[own]
            reach = np.where(way * logits > 0, 1 - bound.relative, 1 + bound.relative)
            off = way * (bound.relative * np.abs(logits) + off) / np.maximum(reach, 1e-9)
            recorded = logits + off
            allowed = bound.relative * np.abs(recorded) + products + bound.absolute
            assert (np.abs(off) <= allowed * (1 + 1e-9)).all()
            most = np.maximum(most, np.abs(log_probs(recorded)[own] - right))
    allowed = scores.allowed.numpy()
    assert (most <= allowed).all()
    # And it is no idle bound: the worst way comes near it while errors are small.
    if size < 0.1:
        assert (0.8 * (allowed - 5e-5) <= most).all()


def log_probs(logits: np.ndarray) -> np.ndarray:
    peak = logits.max(-1, keepdims=True)
    found: np.ndarray = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    return found


def test_an_unlikely_column_of_great_error_counts_for_nothing() -> None:
    logits = torch.tensor([[5.0, 4.0, -3000.0]])
    scores = scores_of(logits, [0], ErrorBound(relative=0.01))
    assert float(scores.allowed) < 0.05
    likely = scores_of(torch.tensor([[60.0, 4.0, -3.0]]), [0], ErrorBound(relative=0.01))
    assert float(likely.allowed) < 1e-4


def test_parts_of_the_vocabulary_are_merged() -> None:
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 30, generator=made) * 4
    bound = derived_bound(width=64, reference=torch.bfloat16)
    tokens = [0, 29, 14, 15, 7, -1]
    whole = scores_of(logits, tokens, bound)
    left, right = (TokenScores(torch.tensor(tokens), bound, "cpu") for _ in "ab")
    left.add(0, 0, logits[:, :15], NONE)
    right.add(0, 15, logits[:, 15:], NONE)
    for first, second in ((left, right), (right, left)):
        merged = copy.deepcopy(first)
        merged.merge(second)
        torch.testing.assert_close(
            merged.log_probs, whole.log_probs, equal_nan=True, atol=1e-6, rtol=1e-6
        )
        torch.testing.assert_close(
            merged.allowed, whole.allowed, equal_nan=True, atol=1e-6, rtol=1e-5
        )
    assert left.log_probs[1].isnan()


def test_a_token_that_has_no_chance_scores_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    scores = scores_of(logits, [1, 0], derived_bound(width=64, reference=torch.float32))
    assert scores.log_probs.tolist() == [-torch.inf, 0.0]
    assert 0 < float(scores.allowed[1]) < 1e-5
