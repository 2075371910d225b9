"""Comparisons in hand-worked cases: what is written, the places shown, ties, infinities."""

from __future__ import annotations

import math

import pytest
import torch

from opdtool.core.bounds import ErrorBound, RowsAndColumns, derived_bound, given_bound
from opdtool.core.compare import Comparison, Greatest, Place

NO_NORMS = RowsAndColumns()


def test_of_equal_errors_the_earlier_place_is_kept() -> None:
    early, late = Place(1, 5, 0.0, 1.0), Place(2, 0, 0.0, 1.0)
    for first, second in ((early, late), (late, early)):
        kept = Greatest()
        kept.offer(Greatest(3.0, first))
        kept.offer(Greatest(3.0, second))
        assert (kept.value, kept.place) == (3.0, early)
    kept = Greatest(3.0, early)
    kept.offer(Greatest(4.0, late))
    kept.offer(Greatest(9.0, None))
    assert (kept.value, kept.place) == (4.0, late)


def test_of_equal_logits_the_lower_column_is_the_greatest() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0, 4.0, 0.0]])
    found = Comparison(1, given_bound(0, 0))
    for column in range(0, 6, 2):
        part = logits[:, column : column + 2]
        found.add(0, column, part, part, NO_NORMS)
    assert (found.top_rebuilt.tolist(), found.top_recorded.tolist()) == ([1], [1])


# bfloat16 has numbers 1 and 1.0078125 side by side; their middle is 1.00390625.
MIDDLE, UP = 1.00390625, 1.0078125


def test_statistics_are_of_what_is_written_and_a_derived_bound_of_what_is_not_rounded() -> None:
    rebuilt, reference = torch.tensor([[1.003, 2.0]]), torch.tensor([[1.0, 2.0]])
    tight = ErrorBound(absolute=1e-3)
    derived = Comparison(1, tight, output=torch.bfloat16)
    derived.add(0, 0, rebuilt, reference, NO_NORMS)
    assert (derived.absolute.value, derived.mismatches) == (0.0, 1)
    given = Comparison(1, given_bound(None, 1e-3), output=torch.bfloat16)
    given.add(0, 0, rebuilt, reference, NO_NORMS)
    assert (given.absolute.value, given.mismatches) == (0.0, 0)
    wide = Comparison(1, given_bound(None, 1e-3), output=torch.float32)
    wide.add(0, 0, rebuilt, reference, NO_NORMS)
    assert wide.absolute.value == pytest.approx(0.003, rel=1e-4)
    assert wide.mismatches == 1


@pytest.mark.parametrize(
    ("order", "reference", "written"),
    [
        (0.0, UP, 1.0),  # no doubt about the sum: it rounds down
        (0.001, UP, UP),  # 1.003 + 0.001 * 2 * 1 is past the middle
        (0.0001, UP, 1.0),  # 1.0032 is not
        (0.001, 1.0, 1.0),
        (0.001, 3.0, UP),  # the nearest to what is recorded that it may round to
        (0.001, -3.0, 1.0),
    ],
)
def test_where_the_order_of_a_sum_decides_the_recorded_neighbour_is_taken(
    order: float, reference: float, written: float
) -> None:
    assert MIDDLE - 0.002 < 1.003 < MIDDLE
    found = Comparison(1, given_bound(None, 9), output=torch.bfloat16, order=order)
    norms = RowsAndColumns(rows=torch.tensor([2.0]), columns=torch.tensor([1.0]))
    found.add(0, 0, torch.tensor([[1.003]]), torch.tensor([[reference]]), norms)
    assert found.absolute.place is not None
    assert found.absolute.place.rebuilt == written


def test_without_norms_what_is_written_is_rounded_plainly() -> None:
    for norms in (
        NO_NORMS,
        RowsAndColumns(rows=torch.ones(1)),
        RowsAndColumns(columns=torch.ones(1)),
    ):
        found = Comparison(1, given_bound(None, 9), output=torch.bfloat16, order=0.5)
        found.add(0, 0, torch.tensor([[1.003]]), torch.tensor([[UP]]), norms)
        assert found.absolute.place is not None
        assert found.absolute.place.rebuilt == 1.0


def test_what_overflows_when_written_is_recorded_so_or_as_a_number() -> None:
    # 65520 rounds to infinity in float16, 65519 to its greatest number 65504.
    found = Comparison(1, given_bound(0, 0), output=torch.float16, order=1e-6)
    norms = RowsAndColumns(rows=torch.ones(1), columns=torch.full((4,), 1.0))
    rebuilt = torch.tensor([[65600.0, 65600.0, 1.0, -70000.0]])
    reference = torch.tensor([[math.inf, 65504.0, 1.0, -math.inf]])
    found.add(0, 0, rebuilt, reference, norms)
    assert [place.column for place in found.first] == [1]
    assert found.absolute.value == math.inf


def test_each_term_of_the_bound_has_its_own_norms() -> None:
    bound = ErrorBound(relative=0.5, accumulation=0.25, operand=0.125, absolute=1.0)
    norms = RowsAndColumns(
        rows=torch.tensor([2.0, 4.0]), columns=torch.tensor([8.0]),
        rows4=torch.tensor([16.0, 3.0]), columns4=torch.tensor([0.5]),
    )  # fmt: skip
    # |ref| 6: 3 + 0.25 * 2 * 8 + 0.125 * 16 * 0.5 + 1 = 9; then 3 + 8 + 0.1875 + 1 = 12.1875.
    reference = torch.tensor([[6.0], [-6.0]])
    found = Comparison(2, bound)
    found.add(0, 0, reference + torch.tensor([[4.5], [-6.09375]]), reference, norms)
    assert found.worst.tolist() == [0.5, 0.5]
    assert (found.multiple.value, found.mismatches) == (0.5, 0)


def test_one_infinity_among_numbers_leaves_the_others_errors_as_they_are() -> None:
    found = Comparison(2, given_bound(None, 1))
    rebuilt = torch.tensor([[1.0, -math.inf], [2.0, 5.0]])
    reference = torch.tensor([[1.5, -math.inf], [2.0, 3.0]])
    found.add(0, 0, rebuilt, reference, NO_NORMS)
    assert (found.absolute.value, found.mismatches) == (2.0, 1)
    assert found.above.tolist() == [0.0, 2.0]
    assert found.below.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_no_more_places_are_kept_than_asked_for_and_they_are_the_first(limit: int) -> None:
    wrong = torch.ones(3, 4)
    found = Comparison(3, given_bound(0, 0), places=limit)
    for low in (2, 0, 1):  # the last slot comes first
        found.add(low, 0, wrong[:1], torch.zeros(1, 4), NO_NORMS)
        assert len(found.first) == min(limit, found.mismatches)
    first = [(place.slot, place.column) for place in found.first]
    assert first == [divmod(i, 4) for i in range(limit)]
    assert found.mismatches == 12


def test_labels_name_the_slots_and_order_the_places() -> None:
    found = Comparison(3, given_bound(0, 0), places=2, labels=torch.tensor([7, 2, 5]))
    found.add(0, 10, torch.ones(3, 1), torch.zeros(3, 1), NO_NORMS)
    assert [(place.slot, place.column) for place in found.first] == [(2, 10), (5, 10)]
    assert found.absolute.place is not None
    assert found.absolute.place.slot == 7  # the first that was compared


def test_a_row_of_minus_infinity_has_no_greatest_column() -> None:
    nothing = torch.full((1, 3), -math.inf)
    found = Comparison(1, derived_bound(width=1, reference=torch.float32))
    found.add(0, 0, nothing, nothing, NO_NORMS)
    assert found.mismatches == 0
    assert found.top1_agrees.tolist() == [True]
