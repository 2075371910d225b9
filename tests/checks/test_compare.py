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
    assert found.stats() == {
        "mismatches": 5, "total": 7, "max_abs": math.inf, "max_rel": math.inf,
        "nan": 1, "infinite": 1,
    }  # fmt: skip
    assert [place["index"] for place in found.first][:4] == ["[0, 1]", "[1, 0]", "[1, 1]", "[1, 2]"]
    finding = found.finding("x")
    assert (finding.status, finding.mismatches, finding.total) == ("fail", 5, 7)
    assert finding.message == (
        "values differ; the greatest difference of finite pairs is 2, relative 0.5; "
        "1 pair is infinitely far apart; 1 pair holds NaN, which equals nothing"
    )


def test_equal_tensors_have_no_figures_and_say_nothing_of_nan() -> None:
    found = Difference(shape=(3,), rtol=1.0, atol=1.0)
    found.add(0, torch.tensor([1.0, -math.inf, 3]), torch.tensor([1.0, -math.inf, 3]))
    assert found.stats() == {
        "mismatches": 0, "total": 3, "max_abs": 0.0, "max_rel": 0.0, "nan": 0, "infinite": 0,
    }  # fmt: skip
    assert found.finding("x").message == "all values agree"


def test_what_differs_without_nan_says_nothing_of_nan() -> None:
    found = Difference(shape=(2,))
    found.add(0, torch.tensor([0, 5]), torch.tensor([3, 5]))
    assert found.finding("x").message == "values differ; the greatest difference is 3"


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
    assert found.max_abs == math.inf
    assert "is 2.5, relative 0.3125; 1 pair is infinitely far apart" in found.finding("x").message


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


@pytest.mark.parametrize(
    ("left", "right", "atol", "rtol", "distance"),
    [
        (2**53, 2**53 + 1, 0.5, 0.0, 1),
        (2**60, 2**60 + 100, 50.0, 0.0, 100),
        (2**60, 2**60 + 100, 99.99, 0.0, 100),
        (2**60, 2**60 + 100, 0.0, 8e-17, 100),  # 2^60 * 8e-17 is 92.2
        (-(2**63), 2**63 - 1, 2.0**63, 0.0, 2**64 - 1),
        (2**63 - 1, -(2**63), 0.0, 1.5, 2**64 - 1),
        (-(2**63), 0, 2.0**62, 0.0, 2**63),
    ],
)
def test_integers_keep_every_digit_also_within_a_tolerance(
    left: int, right: int, atol: float, rtol: float, distance: int
) -> None:
    assert abs(left - right) == distance > atol + rtol * abs(left)
    found = Difference(shape=(1,), atol=atol, rtol=rtol)
    found.add(0, torch.tensor([left]), torch.tensor([right]))
    assert found.mismatches == 1
    assert found.max_abs == distance
    assert f"the greatest difference is {distance}" in found.finding("x").message
    assert found.first == [{"index": "[0]", "expected": left, "actual": right}]


@pytest.mark.parametrize(
    ("left", "right", "atol", "rtol"),
    [
        (2**60, 2**60 + 100, 100.0, 0.0),
        (2**60, 2**60 + 100, 0.0, 9e-17),
        (-(2**63), 2**63 - 1, 2.0**64, 0.0),
        (-(2**63), 2**63 - 1, 0.0, 2.0),
    ],
)
def test_integers_within_the_tolerance_pass(
    left: int, right: int, atol: float, rtol: float
) -> None:
    found = Difference(shape=(1,), atol=atol, rtol=rtol)
    found.add(0, torch.tensor([left]), torch.tensor([right]))
    assert found.max_abs == abs(left - right)
    assert found.finding("x").status == "pass"


def test_unsigned_integers_are_shown_as_they_are() -> None:
    left = torch.tensor([2**64 - 1, 7], dtype=torch.uint64)
    right = torch.tensor([2**64 - 3, 7], dtype=torch.uint64)
    found = Difference(shape=(2,), atol=1.0)
    found.add(0, left, right)
    assert found.first == [{"index": "[0]", "expected": 2**64 - 1, "actual": 2**64 - 3}]
    assert found.max_abs == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_infinity_against_a_number_is_no_small_difference(dtype: torch.dtype) -> None:
    found = Difference(shape=(2,), atol=1e300)
    found.add(0, torch.tensor([math.inf, 1]).to(dtype), torch.tensor([1, math.nan]).to(dtype))
    assert found.mismatches == 2
    assert found.finding("x").message == (
        "values differ; 1 pair is infinitely far apart; 1 pair holds NaN, which equals nothing"
    )


def test_an_error_from_zero_has_no_relative_size() -> None:
    found = Difference(shape=(2,))
    found.add(0, torch.tensor([0.0, 1.0]), torch.tensor([4.0, 1.5]))
    assert (found.max_abs, found.max_rel) == (4.0, 0.5)
    found = Difference(shape=(1,))
    found.add(0, torch.tensor([0.0]), torch.tensor([4.0]))
    assert (found.max_abs, found.max_rel) == (4.0, 0.0)
    assert found.finding("x").message == "values differ; the greatest difference is 4"


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        ([2.0, math.inf], "of finite pairs is 1, relative 1; 1 pair is infinitely far apart"),
        ([2.0, math.nan], "of finite pairs is 1, relative 1; 1 pair holds NaN, which equals"),
        ([2.0, 1.0], "values differ; the greatest difference is 1, relative 1"),
    ],
)
def test_the_greatest_difference_says_when_not_all_pairs_are_finite(
    actual: list[float], words: str
) -> None:
    found = Difference(shape=(2,))
    found.add(0, torch.ones(2), torch.tensor(actual))
    assert words in found.finding("x").message


def test_float8_and_negative_integers_are_compared_by_value() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        found = Difference(shape=(3,))
        left, right = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, -4.0, 0.5])
        found.add(0, left.to(dtype), right.to(dtype))
        assert (found.mismatches, found.max_abs, found.max_rel) == (1, 2.0, 1.0)
    found = Difference(shape=(2,), rtol=0.5)
    found.add(0, torch.tensor([-8, -8]), torch.tensor([-4, -13]))
    assert (found.mismatches, found.max_rel) == (1, 0.625)
    assert [place["actual"] for place in found.first] == [-13]


def test_an_integer_tolerance_past_all_distances_passes_and_no_other_does() -> None:
    least, most = torch.tensor([-(2**63)]), torch.tensor([2**63 - 1])
    for atol, mismatches in ((2.0**64, 0), (2.0**63, 1), (1.0, 1)):
        found = Difference(shape=(1,), atol=atol)
        found.add(0, least, most)
        assert (found.mismatches, found.max_abs) == (mismatches, 2**64 - 1)


def test_float64_is_compared_in_all_its_bits() -> None:
    found = Difference(shape=(2,))
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found.add(0, one, one + torch.tensor([0.0, 2**-51], dtype=torch.float64))
    assert (found.mismatches, found.max_abs, found.max_rel) == (1, 2**-51, 2**-52)
