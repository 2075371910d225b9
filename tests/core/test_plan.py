"""Which rows go into which pack, and how full packs are, against hand-worked figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opdtool.core.geometry import PackGeometry
from opdtool.core.offsets import Ints
from opdtool.core.plan import BinOptions, PackPlan, bin_capacity, plan_packs, utilisation

NONE = PackGeometry()


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def in_order(max_tokens: int, **more: Any) -> BinOptions:
    """Rows in their order, so that bins can be worked out by hand."""
    return BinOptions(max_tokens=max_tokens, algorithm="concat", **more)


def bins_of(plan: PackPlan) -> list[list[int]]:
    return [plan.rows(m).tolist() for m in range(plan.microbatches)]


def test_without_a_limit_all_rows_are_one_pack_in_their_order() -> None:
    plan = plan_packs(ints(3, 1, 2), PackGeometry(cp_size=2), BinOptions())
    assert plan.microbatches == 1
    assert bins_of(plan) == [[0, 1, 2]]
    layout = plan.layout(0)
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert layout.cu_seqlens_padded.tolist() == [0, 4, 8, 12]
    assert layout.sequence_index.tolist() == [0, 1, 2]
    assert layout.cp_size == 2
    assert plan.dropped.tolist() == []


def test_with_a_limit_rows_are_dealt_out_and_keep_their_numbers() -> None:
    plan = plan_packs(ints(4, 4, 3, 4), NONE, in_order(8))
    assert bins_of(plan) == [[0, 1], [2, 3]]
    assert [layout.sequence_index.tolist() for layout in plan.layouts()] == [[0, 1], [2, 3]]
    assert plan.layout(1).cu_seqlens.tolist() == [0, 3, 7]


def test_rows_of_length_0_are_named_or_left_out_when_that_is_asked_for() -> None:
    lengths = ints(0, 3, 0, 2)
    with pytest.raises(ValueError, match=r"^rows 0, 2 of length 0 .* --drop-empty"):
        plan_packs(lengths, NONE, BinOptions())
    with pytest.raises(ValueError, match=r"^row 1 of length 0"):
        plan_packs(ints(1, 0), NONE, BinOptions())
    for bins in (BinOptions(), in_order(5)):
        plan = plan_packs(lengths, NONE, bins, drop_empty=True)
        assert bins_of(plan) == [[1, 3]]
        assert plan.dropped.tolist() == [0, 2]
    with pytest.raises(ValueError, match="no rows with tokens"):
        plan_packs(ints(0, 0), NONE, BinOptions(), drop_empty=True)


def test_of_many_empty_rows_eight_are_named_and_the_rest_counted() -> None:
    with pytest.raises(ValueError, match=r"^rows 0, 1, 2, 3, 4, 5, 6, 7 of length 0"):
        plan_packs(np.zeros(8, dtype=np.int64), NONE, BinOptions())
    with pytest.raises(ValueError, match=r"rows 0, 1, 2, 3, 4, 5, 6, 7 and 2 more of length 0"):
        plan_packs(np.zeros(10, dtype=np.int64), NONE, BinOptions())


def test_a_total_that_cannot_be_held_is_refused_before_anything_is_written() -> None:
    assert plan_packs(ints(5, 5), PackGeometry(pad_packed_to=10), BinOptions()).microbatches == 1
    with pytest.raises(ValueError, match="11 padded slots, more than pad-packed-to 10"):
        plan_packs(ints(5, 6), PackGeometry(pad_packed_to=10), BinOptions())


@pytest.mark.parametrize(
    ("geometry", "max_tokens", "capacity"),
    [
        ({}, 7, 7),
        ({}, 1, 1),
        ({"cp_size": 2}, 4, 4),
        ({"cp_size": 2}, 11, 8),
        ({"fp8": "tensorwise"}, 47, 32),
        ({"pad_packed_to": 8}, 8, 8),
        ({"pad_packed_to": 8}, 100, 8),
    ],
)
def test_the_capacity_of_a_bin_leaves_room_for_its_tail(
    geometry: dict[str, Any], max_tokens: int, capacity: int
) -> None:
    assert bin_capacity(PackGeometry(**geometry), max_tokens) == capacity


@pytest.mark.parametrize(
    ("geometry", "max_tokens", "says"),
    [
        ({"pad_packed_to": 9}, 8, "pad-packed-to 9 is more than --max-tokens 8"),
        ({"cp_size": 2}, 3, "--max-tokens 3 is less than 4, the smallest total"),
    ],
)
def test_a_limit_below_every_pack_is_refused(
    geometry: dict[str, Any], max_tokens: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        bin_capacity(PackGeometry(**geometry), max_tokens)


def test_a_row_of_exactly_the_limit_fits_and_a_longer_one_is_named() -> None:
    geometry = PackGeometry(cp_size=2)
    assert bins_of(plan_packs(ints(8, 1), geometry, in_order(8))) == [[0], [1]]
    said = (
        "row 2 has 9 tokens, 12 padded slots, more than the 8 that --max-tokens 11 leaves; "
        "raise it to at least 16"
    )
    with pytest.raises(ValueError, match=said):
        plan_packs(ints(8, 0, 9, 13), geometry, in_order(11), drop_empty=True)


def test_the_options_of_bins_reach_the_bins() -> None:
    lengths = ints(1, 1, 1, 1)
    assert bins_of(plan_packs(lengths, NONE, in_order(4))) == [[0, 1, 2, 3]]
    assert plan_packs(lengths, NONE, in_order(4, min_bins=3)).microbatches == 3
    assert plan_packs(lengths, NONE, in_order(4, bins_multiple_of=2)).microbatches == 2
    many = np.arange(1, 60, dtype=np.int64)
    orders = {
        tuple(
            plan_packs(
                many, NONE, BinOptions(max_tokens=64, algorithm="ffs", seed=seed)
            ).order.tolist()
        )
        for seed in (1, 1, 2)
    }
    assert len(orders) == 2


@pytest.mark.parametrize("more", [{"min_bins": 2}, {"bins_multiple_of": 2}])
def test_bins_without_a_size_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give their size with --max-tokens"):
        BinOptions(**more)
    assert BinOptions(max_tokens=8, **more).max_tokens == 8
    assert (BinOptions().min_bins, BinOptions().bins_multiple_of, BinOptions().seed) == (1, 1, 0)


def test_the_figures_of_packs_add_up() -> None:
    # Padded to 4: 4 + 4 + 4 | 8; the fp8 tail brings both to 16.
    geometry = PackGeometry(pad_multiple=4, fp8="tensorwise")
    figures = utilisation(plan_packs(ints(3, 4, 1, 5), geometry, in_order(16, min_bins=2)))
    assert figures.loads == (8, 5)
    assert figures.totals == (16, 16)
    assert (figures.real_tokens, figures.alignment_padding, figures.tail_padding) == (13, 7, 12)
    assert figures.slots == 32
    assert figures.utilisation == 13 / 32
    assert (figures.microbatches, figures.lower_bound) == (2, 2)
    assert figures.balance == 8 / 6.5


def test_one_pack_is_its_own_lower_bound() -> None:
    figures = utilisation(plan_packs(ints(3, 2), PackGeometry(pad_packed_multiple=4), BinOptions()))
    assert (figures.lower_bound, figures.balance, figures.totals) == (1, 1.0, (8,))
    assert (figures.alignment_padding, figures.tail_padding) == (0, 3)
