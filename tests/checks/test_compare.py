"""Two tensors compared piece by piece, against hand-worked figures."""

from __future__ import annotations

import math

import pytest
import torch

from opdtool.checks.compare import Difference


def test_figures_add_up_over_pieces() -> None:
    found = Difference(shape=(2, 3))
    found.add(0, torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2.5, 3]))
    found.add(3, torch.tensor([4.0, math.nan, -math.inf]), torch.tensor([6.0, math.nan, math.inf]))
    found.add(0, torch.tensor([8.0]), torch.tensor([7.5]))
    assert found.stats() == {"mismatches": 5, "total": 7, "max_abs": 2.0, "max_rel": 0.5}
    assert found.nan == 1
    assert [place["index"] for place in found.first][:4] == ["[0, 1]", "[1, 0]", "[1, 1]", "[1, 2]"]
    finding = found.finding("x")
    assert (finding.status, finding.mismatches, finding.total) == ("fail", 5, 7)
    assert "greatest difference is 2, relative 0.5; 1 of the pairs hold NaN" in finding.message


def test_equal_tensors_have_no_figures_and_say_nothing_of_nan() -> None:
    found = Difference(shape=(3,), rtol=1.0, atol=1.0)
    found.add(0, torch.tensor([1.0, -math.inf, 3]), torch.tensor([1.0, -math.inf, 3]))
    assert found.stats() == {"mismatches": 0, "total": 3, "max_abs": 0.0, "max_rel": 0.0}
    assert found.finding("x").message == "all values agree"


def test_what_differs_without_nan_says_nothing_of_nan() -> None:
    found = Difference(shape=(2,))
    found.add(0, torch.tensor([0, 5]), torch.tensor([3, 5]))
    assert found.finding("x").message == "values differ; the greatest difference is 3, relative 0"


@pytest.mark.parametrize(
    ("rtol", "atol", "mismatches"),
    [(0.0, 0.0, 3), (0.0, 0.5, 2), (0.25, 0.0, 2), (0.25, 0.5, 1), (9.0, 9.0, 1)],
)
def test_a_tolerance_is_absolute_plus_relative_and_passes_no_infinity(
    rtol: float, atol: float, mismatches: int
) -> None:
    # Errors of 0.5 on 2 (its quarter), of 2.5 on 8, and an infinity.
    found = Difference(shape=(4,), rtol=rtol, atol=atol)
    found.add(0, torch.tensor([2.0, 8, 1, 7]), torch.tensor([2.5, 10.5, math.inf, 7]))
    assert found.mismatches == mismatches
    assert found.max_abs == 2.5


def test_within_a_tolerance_the_greatest_difference_is_told() -> None:
    found = Difference(shape=(2,), atol=1.0)
    found.add(0, torch.tensor([2.0, 8]), torch.tensor([2.5, 8]))
    assert found.finding("x").status == "pass"
    said = "all values agree within the tolerance; the greatest difference is 0.5"
    assert found.finding("x").message == said


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool], ids=str
)
def test_dtypes_that_torch_cannot_compare_are_compared(dtype: torch.dtype) -> None:
    found = Difference(shape=(2,))
    found.add(0, torch.tensor([1, 0]).to(dtype), torch.tensor([1, 1]).to(dtype))
    assert found.mismatches == 1
    assert found.first[0]["index"] == "[1]"


def test_no_more_than_the_first_places_are_kept() -> None:
    found = Difference(shape=(40,))
    for start in (0, 20):
        found.add(start, torch.zeros(20), torch.ones(20))
    assert found.mismatches == 40
    assert [place["index"] for place in found.first] == [f"[{i}]" for i in range(10)]
