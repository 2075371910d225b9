"""The numbers of a bound, worked out by hand, and what precision is read off recorded logits."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from opdtool.core.bounds import (
    TINY,
    ErrorBound,
    derived_bound,
    given_bound,
    precision_behind,
    stored_precision,
)

HALF = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("roundings", "units"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0)])
def test_relative_is_half_a_unit_a_rounding_and_at_least_one_unit(
    dtype: torch.dtype, roundings: int, units: float
) -> None:
    eps = UNIT[dtype]
    bound = derived_bound(width=0, reference=dtype, roundings=roundings)
    assert bound.relative == units * eps * (1 + 8 * eps)
    assert (bound.accumulation, bound.operand, bound.given) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("width", "units"),
    [(1, 3), (2, 4), (62, 8 * sqrt(62)), (4096, 512), (7, 9), (61, 8 * sqrt(61))],
)
def test_accumulation_is_the_less_of_two_bounds(width: int, units: float) -> None:
    bound = derived_bound(width=width, reference=torch.float32)
    assert bound.accumulation == units * 2.0**-23
    assert derived_bound(
        width=width, reference=torch.float32, scale=-3.0
    ).accumulation == pytest.approx(3 * units * 2.0**-23)


def test_operand_counts_the_roundings_before_the_product() -> None:
    for count in (1, 2, 4):
        bound = derived_bound(
            width=8, reference=torch.float32, operand=torch.bfloat16, operand_roundings=count,
            scale=-0.5,
        )  # fmt: skip
        assert bound.operand == 8 * 2.0**-8 * sqrt(count) * 0.5


def test_absolute_is_the_spacing_of_the_least_numbers() -> None:
    # float16: 2^-14 is the least normal number, 2^-24 the spacing below it.
    assert derived_bound(width=1, reference=torch.float16).absolute == 2.0**-24
    assert derived_bound(width=1, reference=torch.float16, scale=-4.0).absolute == 2.0**-22
    assert derived_bound(width=1, reference=torch.float16, scale=0.25).absolute == 2.0**-24
    assert derived_bound(width=1, reference=torch.float32).absolute == TINY


def test_a_given_bound_has_the_numbers_given() -> None:
    assert given_bound(0.5, 0.25) == ErrorBound(relative=0.5, absolute=0.25, given=True)
    assert given_bound(None, None) == ErrorBound(relative=0.0, absolute=TINY, given=True)


def test_scaling_multiplies_all_but_the_relative_term() -> None:
    bound = ErrorBound(relative=0.5, accumulation=2.0, operand=4.0, absolute=8.0)
    assert bound.scaled(-3.0) == ErrorBound(
        relative=0.5, accumulation=6.0, operand=12.0, absolute=24.0
    )
    assert bound.scaled(0.0).absolute == TINY


def test_a_few_wrong_values_do_not_hide_a_narrow_dtype() -> None:
    values = torch.linspace(1, 2, 100).bfloat16().float()
    values[:10] += 2.0**-20
    assert stored_precision(values) == torch.bfloat16
    values[10] += 2.0**-20
    assert stored_precision(values) == torch.float32


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(400, generator=torch.Generator().manual_seed(seed)) * 8


@pytest.mark.parametrize("narrow", HALF)
@pytest.mark.parametrize(
    ("scale", "softcap"), [(0.3, None), (7.0, None), (None, 30.0), (0.3, 50.0), (7.0, 300.0)]
)
def test_narrow_logits_are_seen_behind_what_a_model_did_after_widening_them(
    narrow: torch.dtype, scale: float | None, softcap: float | None
) -> None:
    # bfloat16 times 7 has the 11 bits of a float16: the coarser of both is what rounded.
    for logits, expected in (
        (random_logits(0), torch.float32),
        (random_logits(0).to(narrow).float(), narrow),
    ):
        recorded = logits * (scale or 1.0)
        if softcap is not None:
            recorded = softcap * torch.tanh(recorded / softcap)
        assert precision_behind(recorded, scale=scale, softcap=softcap) == expected


def test_a_narrow_dtype_is_also_seen_between_scale_and_softcap() -> None:
    scaled = (random_logits(1) * 0.7).bfloat16().float()
    recorded = 30.0 * torch.tanh(scaled / 30.0)
    assert stored_precision(recorded) == torch.float32
    assert precision_behind(recorded, scale=0.7, softcap=30.0) == torch.bfloat16
    # And as the input of the tanh.
    inner = (random_logits(1) / 30.0).bfloat16().float()
    assert precision_behind(30.0 * torch.tanh(inner), softcap=30.0) == torch.bfloat16
    # Or its result, which is multiplied by the cap.
    capped = torch.tanh(random_logits(1) / 30.0).bfloat16().float()
    assert precision_behind(30.0 * capped, softcap=30.0) == torch.bfloat16


def test_what_a_tanh_has_flattened_tells_nothing() -> None:
    nearly = torch.full((50,), 30.0 * (1 - 2.0**-22))
    assert not _narrow(nearly, torch.bfloat16)
    assert precision_behind(nearly, softcap=30.0) == torch.float32
    # The steep ones among them still do.
    logits = torch.cat([nearly, 30.0 * torch.tanh(random_logits(3).bfloat16().float() / 30.0)])
    assert precision_behind(logits, softcap=30.0) == torch.bfloat16


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(dtype).float(), values)


def test_narrow_values_need_no_undoing_and_narrow_files_neither() -> None:
    values = random_logits(2).bfloat16()
    assert precision_behind(values, scale=0.3, softcap=30.0) == torch.bfloat16
    assert precision_behind(values.float(), scale=0.3, softcap=30.0) == torch.bfloat16
    assert precision_behind(random_logits(2)) == torch.float32
