"""The numbers behind faults of teacher logits: hand-worked rows, factors, caps and orders."""

from __future__ import annotations

import pytest
import torch

from opdtool.checks.faults_teacher_sample import Sample
from opdtool.checks.faults_teacher_search import (
    best_cap,
    best_factor,
    coarser,
    heads_fitting,
    mostly,
    slope,
)
from opdtool.checks.faults_teacher_shifts import (
    column_shifts,
    cp_orders,
    heads_alike,
    likeness,
    position_shifts,
    ranks,
)
from opdtool.core.rebuild import Variant
from tests.checks.test_teacher import DRAFT, memory, with_reference

NAN, INF = torch.nan, torch.inf


def test_ranks_run_from_minus_one_to_one_with_equals_alike_and_gaps_left_out() -> None:
    rows = torch.tensor([[5.0, 1.0, 3.0, 3.0], [NAN, 2.0, -INF, 7.0]])
    found, there = ranks(rows)
    # Of n numbers the k-th (from 0) has (2k + 1) / n - 1; two equals have their middle.
    assert found.tolist() == [[0.75, -0.75, 0.0, 0.0], [0.0, -0.5, 0.0, 0.5]]
    assert there.tolist() == [[True] * 4, [False, True, False, True]]


def test_likeness_is_one_for_what_rises_together_and_nan_where_nothing_is_told() -> None:
    x = torch.arange(10.0)
    rows = torch.stack([x, x.exp(), -x, torch.zeros(10)])
    found = likeness(rows, x[None].expand_as(rows))
    assert found[:3].tolist() == pytest.approx([1, 1, -1])
    assert bool(found[3].isnan())
    few = torch.where(x < 7, x, NAN)  # seven in common
    assert bool(likeness(few[None], x[None]).isnan())
    one_more = torch.where(x < 8, x, NAN)
    assert float(likeness(one_more[None], x[None])) == pytest.approx(1)


@pytest.mark.parametrize("shift", [1, -3, 8, -24])
def test_a_shift_of_columns_is_proposed_first_though_all_else_is_one_value(shift: int) -> None:
    case = memory(B=1, S=3, teachers=1)
    made = case.make(Variant(column_shift=shift))
    case.reference = torch.where(made.isnan(), -3.4e38, made)
    assert next(column_shifts(Sample(case).right)) == shift


def test_a_ring_of_columns_is_turned_the_way_that_shares_more() -> None:
    case = memory(B=1, S=3, teachers=1)
    case.reference = case.make().roll(-10, -1)
    assert list(column_shifts(Sample(case).right))[:2] == [10, -22]


def test_unlike_rows_propose_no_shift() -> None:
    case = memory(B=2, S=6)
    case.reference = torch.randn(case.make().shape, generator=torch.Generator().manual_seed(3))
    view = Sample(case).right
    assert list(column_shifts(view)) == []
    assert list(position_shifts(view)) == []
    assert list(cp_orders(view)) == []


def test_a_shift_before_the_cut_is_looked_for_over_the_whole_vocabulary() -> None:
    case = with_reference(memory(draft=DRAFT), Variant(target_shift=5))
    view = Sample(case).right
    assert next(column_shifts(view, before_cut=True)) == 5
    assert list(column_shifts(view)) == []


def test_a_shift_is_found_beside_a_scale_a_cap_and_an_offset() -> None:
    case = memory(B=2, S=9)
    for made in (
        Variant(column_shift=6, factor=0.01),
        Variant(column_shift=6, softcap=1.0),
        Variant(column_shift=6, log_probs=True),
    ):
        with_reference(case, made)
        assert next(column_shifts(Sample(case).right)) == 6
        moved = Variant(position_shift=-2).also(made)
        with_reference(case, Variant(position_shift=-2), made)
        assert moved.position_shift == -2
        assert list(position_shifts(Sample(case).right)) == []  # other columns hide it
    with_reference(case, Variant(position_shift=-2, factor=3.0))
    assert list(position_shifts(Sample(case).right)) == [-2]


def test_another_order_of_ranks_is_found_with_the_ranks_that_hold_only_few() -> None:
    case = with_reference(memory(B=1, S=8, cp_size=4), Variant(cp_order=(2, 3, 1, 0)))
    assert list(cp_orders(Sample(case).right)) == [(2, 3, 1, 0)]
    assert list(cp_orders(Sample(with_reference(case)).right)) == []


def test_heads_fit_within_the_tolerance_and_are_alike_but_for_a_factor() -> None:
    case = with_reference(memory(), Variant(routes=(1, 1, 0)))
    view = Sample(case).right
    units, fits = heads_fitting(view, 10)
    assert (units.tolist(), fits.tolist()) == ([0, 1, 2], [[False, True]] * 2 + [[True, False]])
    with_reference(case, Variant(routes=(1, 1, 0), factor=2.0))
    view = Sample(case).right
    assert not heads_fitting(view, 10)[1].any()
    assert heads_alike(view, 10)[1].tolist() == [[False, True]] * 2 + [[True, False]]


MADE = torch.tensor([[1.0, -2.0, 4.0, -8.0, 3.0, 0.5]])


@pytest.mark.parametrize("factor", [0.5, -2.0, 1 / 0.7, 30.0])
def test_a_factor_is_found_as_it_was_typed_beside_a_stray_element(factor: float) -> None:
    recorded = factor * MADE
    assert next(best_factor(MADE, recorded)) == pytest.approx(factor, rel=1e-12)
    recorded[0, 4] = 1e6
    assert next(best_factor(MADE, recorded)) == pytest.approx(factor, rel=1e-12)


def test_no_factor_is_found_where_there_is_none() -> None:
    assert list(best_factor(MADE, MADE)) == []
    assert list(best_factor(0 * MADE, MADE)) == []
    assert list(best_factor(MADE, 0 * MADE)) == []
    assert list(best_factor(torch.full_like(MADE, NAN), MADE)) == []


@pytest.mark.parametrize("cap", [5.0, 30.0, 2.5])
def test_a_cap_is_found_as_it_was_typed(cap: float) -> None:
    assert next(best_cap(MADE, cap * (MADE / cap).tanh())) == cap


def test_no_cap_makes_logits_larger() -> None:
    assert list(best_cap(MADE, 2 * MADE)) == []
    assert list(best_cap(MADE, 0 * MADE)) == []
    assert list(best_cap(MADE, MADE)) == []


def test_what_is_recorded_coarsely_says_a_rounder_number_first() -> None:
    recorded = (0.962 * MADE * (1 - 1e-3)).to(torch.float32)
    assert next(best_factor(MADE, recorded)) != 0.96
    assert next(best_factor(MADE, recorded, 0.008)) == 0.96


def test_a_slope_is_found_whatever_was_taken_from_each_row() -> None:
    rows = torch.cat([MADE, 2 * MADE, MADE.flip(-1)])
    less = torch.tensor([[3.0], [-5.0], [100.0]])
    assert next(slope(rows, 0.5 * rows - less)) == pytest.approx(0.5)
    assert list(slope(rows, rows - less)) == []


def test_logits_that_were_bfloat16_before_a_factor_are_known_by_it() -> None:
    case = memory(B=2, S=6)
    half = case.make().to(torch.bfloat16).float()
    case.reference = 0.7 * half
    view = Sample(case).right
    assert coarser(view, factor=0.7) == torch.finfo(torch.bfloat16).eps
    assert coarser(view, factor=0.71) == 0.0
    case.reference = 3 * (half / 3).tanh()
    assert coarser(Sample(case).right, cap=3.0) == torch.finfo(torch.bfloat16).eps


def test_mostly_bears_one_stray_in_twenty() -> None:
    agrees = torch.ones(1, 20, dtype=torch.bool)
    agrees[0, 3] = False
    assert bool(mostly(agrees, dim=1))
    agrees[0, 4] = False
    assert not bool(mostly(agrees, dim=1))
