"""Bin packing over random batches: equal to the slow reference, sound, deterministic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdtool.core.binning import ALGORITHMS, pack_bins
from tests.reference import binning as reference

Packer = Callable[[list[int], int], list[list[int]]]

REFERENCES: dict[str, Packer] = {
    "concat": reference.concat,
    "ffd": reference.first_fit_decreasing,
    "bfd": reference.best_fit_decreasing,
    "mffd": reference.modified_first_fit_decreasing,
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int]:
    """(lengths, capacity): many and few distinct lengths, small and large capacities."""
    capacity = draw(st.sampled_from([1, 2, 3, 7, 12, 60, 97, 1000, 8192]))
    longest = draw(st.integers(1, capacity))
    pool = draw(st.lists(st.integers(1, longest), min_size=1, max_size=draw(st.integers(1, 12))))
    # From three lengths alone, whole runs of bins are filled alike.
    if draw(st.booleans()):
        pool = pool[:3]
    one = st.one_of(st.sampled_from(pool), st.integers(1, longest))
    if draw(st.booleans()):
        one = st.sampled_from(pool)
    return draw(st.lists(one, min_size=1, max_size=70)), capacity


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@settings(max_examples=150, deadline=None)
@given(batch=batches())
def test_the_bins_are_those_of_the_row_by_row_reference(
    algorithm: str, batch: tuple[list[int], int]
) -> None:
    lengths, capacity = batch
    bins = pack_bins(np.array(lengths), capacity, algorithm=algorithm)
    expected = reference.canonical(REFERENCES[algorithm](lengths, capacity))
    assert [bins.rows(number).tolist() for number in range(bins.count)] == expected


@settings(max_examples=100, deadline=None)
@given(batch=batches(), seed=st.integers(0, 2**32))
def test_shuffled_first_fit_is_first_fit_over_the_permutation(
    batch: tuple[list[int], int], seed: int
) -> None:
    lengths, capacity = batch
    bins = pack_bins(np.array(lengths), capacity, algorithm="ffs", seed=seed)
    expected = reference.canonical(reference.first_fit_shuffled(lengths, capacity, seed))
    assert [bins.rows(number).tolist() for number in range(bins.count)] == expected


@settings(max_examples=200, deadline=None)
@given(
    batch=batches(),
    algorithm=st.sampled_from(ALGORITHMS),
    min_bins=st.integers(1, 20),
    multiple=st.integers(1, 9),
)
def test_raised_bins_hold_every_row_once_and_none_is_over_or_empty(
    batch: tuple[list[int], int], algorithm: str, min_bins: int, multiple: int
) -> None:
    lengths, capacity = np.array(batch[0]), batch[1]
    plain = pack_bins(lengths, capacity, algorithm=algorithm)
    wanted = -(-max(plain.count, min_bins) // multiple) * multiple
    options = {"min_bins": min_bins, "bins_multiple_of": multiple}
    if wanted > len(lengths):
        with pytest.raises(ValueError, match=f"{wanted - len(lengths)} sequences? missing"):
            pack_bins(lengths, capacity, algorithm=algorithm, **options)
        return
    bins = pack_bins(lengths, capacity, algorithm=algorithm, **options)
    again = pack_bins(lengths, capacity, algorithm=algorithm, **options)
    assert bins.bin_of.tolist() == again.bin_of.tolist()
    assert bins.count == wanted
    assert sorted(bins.order.tolist()) == list(range(len(lengths)))
    assert bins.sizes.min() >= 1
    assert bins.loads.max() <= plain.loads.max()
    loads = [int(lengths[bins.rows(number)].sum()) for number in range(bins.count)]
    assert bins.loads.tolist() == loads
    firsts = [int(bins.rows(number)[0]) for number in range(bins.count)]
    assert firsts == sorted(firsts)
    assert bins.loads.max() <= capacity
