"""Figures of a tensor seen piece by piece, against hand-worked ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.checks.inspect import Figures, check_finite


def figures_of(*pieces: Tensor) -> Figures:
    found = Figures()
    for piece in pieces:
        found.add(piece)
    return found


def test_pieces_add_up() -> None:
    found = figures_of(torch.tensor([[3.0, -1.0], [math.nan, math.inf]]), torch.tensor([7.0]))
    assert (found.numel, found.nan, found.inf) == (5, 1, 1)
    assert (found.low, found.high, found.mean) == (-1.0, 7.0, 3.0)


def test_nothing_finite_has_no_extremes_and_no_mean() -> None:
    assert figures_of() == Figures(0, 0, 0, None, None, 0.0, 0)
    found = figures_of(torch.tensor([math.nan, -math.inf, math.inf]))
    assert (found.numel, found.nan, found.inf) == (3, 1, 2)
    assert (found.low, found.high, found.mean) == (None, None, None)


@pytest.mark.parametrize(
    ("values", "low", "high", "mean"),
    [
        (torch.tensor([True, False, True, True]), 0, 1, 0.75),
        (torch.tensor([1, 255], dtype=torch.uint8), 1, 255, 128.0),
        (torch.tensor([-128, 127], dtype=torch.int8), -128, 127, -0.5),
        (torch.from_numpy(np.array([2, 65535], np.uint16)), 2, 65535, 32768.5),
        (torch.from_numpy(np.array([0, 2**32 - 1], np.uint32)), 0, 2**32 - 1, 2147483647.5),
        (torch.from_numpy(np.array([1, 2**64 - 1], np.uint64)), 1, 2**64 - 1, 2.0**63),
        (torch.tensor([-(2**63), 2**63 - 1]), -(2**63), 2**63 - 1, 0.0),
        (torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fn), 0.5, 1.5, 1.0),
        (torch.tensor([0.5, 1.5]).bfloat16(), 0.5, 1.5, 1.0),
    ],
)
def test_every_dtype_has_its_extremes_and_mean(
    values: Tensor, low: float, high: float, mean: float
) -> None:
    found = figures_of(values)
    assert (found.numel, found.nan, found.inf) == (len(values), 0, 0)
    assert (found.low, found.high, found.mean) == (low, high, mean)
    assert figures_of(*(values[i : i + 1] for i in reversed(range(len(values))))) == found


def test_a_tensor_that_is_not_finite_is_warned_of_and_the_others_are_not_listed() -> None:
    good, bad = figures_of(torch.ones(4)), figures_of(torch.tensor([math.nan, 1, math.inf, 2]))
    (only,) = check_finite({"good": good, "bad": bad}, {})
    assert (only.code, only.name, only.status) == ("OPD943", "finite-values", "warn")
    assert (only.tensor, only.message) == ("bad", "holds 1 NaN and 1 infinities in 4")


@pytest.mark.parametrize(("count", "words"), [(1, "1 tensor"), (2, "2 tensors")])
def test_finite_tensors_pass_together(count: int, words: str) -> None:
    (only,) = check_finite({f"t{i}": figures_of(torch.ones(3)) for i in range(count)}, {})
    assert (only.status, only.tensor) == ("pass", None)
    assert only.message == f"all values are finite in {words}"


def test_no_tensor_is_no_finding() -> None:
    assert check_finite({}, {}) == []
