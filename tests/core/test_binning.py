"""Bin packing: hand-worked examples, refusals, raised numbers of bins, large sizes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from opdtool.core import binning_classes
from opdtool.core.binning import ALGORITHMS, Bins, pack_bins
from opdtool.core.errors import InputError
from opdtool.core.offsets import Ints
from tests.reference import binning as reference


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def rows_of(bins: Bins) -> list[list[int]]:
    return [bins.rows(number).tolist() for number in range(bins.count)]


def log_normal(rows: int, seed: int = 0) -> Ints:
    draw = np.random.default_rng(seed).normal(np.log(1000), 1.0, rows)
    return np.clip(np.exp(draw).astype(np.int64), 1, 8192)


def assert_sound(bins: Bins, lengths: Ints) -> None:
    """Every row once, nothing over capacity, and all views of the bins agree."""
    assert len(lengths) > 0
    assert sorted(bins.order.tolist()) == list(range(len(lengths)))
    assert bins.sizes.min() >= 1
    for number, rows in enumerate(rows_of(bins)):
        assert rows == sorted(rows)
        assert (bins.bin_of[rows] == number).all()
        assert bins.loads[number] == lengths[rows].sum() <= bins.capacity
    firsts = [rows[0] for rows in rows_of(bins)]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # 7 | 4 4 2: the second row closes the first bin for good.
        ("concat", [[0], [1, 2, 3]]),
        # Rooms 3 and 2 wait for the 2: first fit takes the lower bin ...
        ("ffd", [[0, 3], [1, 2]]),
        # ... best fit the tighter one.
        ("bfd", [[0], [1, 2, 3]]),
    ],
)
def test_each_algorithm_packs_the_worked_example(algorithm: str, expected: list[list[int]]) -> None:
    assert rows_of(pack_bins(ints(7, 4, 4, 2), 10, algorithm=algorithm)) == expected


def test_modified_first_fit_pairs_small_rows_with_the_smallest_large_one() -> None:
    # Capacity 20. Backward: 11 has room 9 for the smallest 4 and then the 5, 12 has room 8
    # for two more 4s. First fit would put the 5 beside the 12 and need a third bin.
    lengths = ints(12, 11, 5, 4, 4, 4)
    assert rows_of(pack_bins(lengths, 20, algorithm="mffd")) == [[0, 4, 5], [1, 2, 3]]
    assert rows_of(pack_bins(lengths, 20, algorithm="ffd")) == [[0, 2], [1, 3, 4], [5]]


def test_modified_first_fit_hands_small_rows_out_backward() -> None:
    # Three bins with room 9: the last takes the first 4 (row 6) and the first 5 (row 3).
    lengths = ints(11, 11, 11, 5, 5, 5, 4, 4, 4)
    assert rows_of(pack_bins(lengths, 20, algorithm="mffd")) == [[0, 5, 8], [1, 4, 7], [2, 3, 6]]
    # Of one length only: the last takes the first two.
    lengths = ints(12, 12, 4, 4, 4, 4)
    assert rows_of(pack_bins(lengths, 20, algorithm="mffd")) == [[0, 4, 5], [1, 2, 3]]


def test_equal_lengths_go_in_row_order() -> None:
    bins = pack_bins(ints(3, 3, 3, 3, 3), 6)
    assert rows_of(bins) == [[0, 1], [2, 3], [4]]


def test_bins_are_numbered_by_their_first_rows() -> None:
    # The 9 of row 2 opens the first bin, but row 0 is in the last.
    bins = pack_bins(ints(2, 8, 9), 10)
    assert rows_of(bins) == [[0, 1], [2]]
    assert bins.bin_of.tolist() == [0, 0, 1]
    assert bins.offsets.tolist() == [0, 2, 3]
    assert bins.loads.tolist() == [10, 9]


def test_the_seed_draws_the_order_of_ffs() -> None:
    lengths = log_normal(500)
    packs = [pack_bins(lengths, 8192, algorithm="ffs", seed=seed) for seed in (0, 0, 1)]
    assert packs[0].bin_of.tolist() == packs[1].bin_of.tolist()
    assert packs[0].bin_of.tolist() != packs[2].bin_of.tolist()
    assert rows_of(packs[2]) == reference.canonical(
        reference.first_fit_shuffled(lengths.tolist(), 8192, seed=1)
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_realistic_batch_is_packed_as_the_slow_reference_packs_it(algorithm: str) -> None:
    lengths = log_normal(600)
    slow: dict[str, Callable[[list[int], int], list[list[int]]]] = {
        "concat": reference.concat,
        "ffd": reference.first_fit_decreasing,
        "bfd": reference.best_fit_decreasing,
        "mffd": reference.modified_first_fit_decreasing,
        "ffs": lambda rows, capacity: reference.first_fit_shuffled(rows, capacity, seed=0),
    }
    expected = reference.canonical(slow[algorithm](lengths.tolist(), 8192))
    assert len(expected) > 50
    bins = pack_bins(lengths, 8192, algorithm=algorithm)
    assert rows_of(bins) == expected
    assert_sound(bins, lengths)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_working_chunk_by_chunk_changes_nothing(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.concatenate([log_normal(300), np.full(200, 7, dtype=np.int64)])
    whole = pack_bins(lengths, 8192, algorithm=algorithm)
    monkeypatch.setattr(binning_classes, "CHUNK_ROWS", 16)
    assert len(lengths) > 10 * 16
    pieces = pack_bins(lengths, 8192, algorithm=algorithm)
    assert pieces.bin_of.tolist() == whole.bin_of.tolist()
    assert pieces.order.tolist() == whole.order.tolist()
    assert pieces.loads.tolist() == whole.loads.tolist()


def test_a_bin_may_reach_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binning_classes, "CHUNK_ROWS", 4)
    bins = pack_bins(np.ones(25, dtype=np.int64), 10, algorithm="concat")
    assert bins.sizes.tolist() == [10, 10, 5]
    assert bins.order.tolist() == list(range(25))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lengths_past_sixteen_and_thirty_two_bits_are_packed_alike(algorithm: str) -> None:
    lengths = log_normal(200)
    small = pack_bins(lengths, 8192, algorithm=algorithm)
    assert small.count > 1
    for factor in (1 << 20, 1 << 40):
        large = pack_bins(lengths * factor, 8192 * factor, algorithm=algorithm)
        assert large.bin_of.tolist() == small.bin_of.tolist()
        assert large.loads.tolist() == (small.loads * factor).tolist()


def test_more_distinct_lengths_than_sixteen_bits_number_are_sorted() -> None:
    # 70,000 distinct lengths, each alone in its bin because it is over half the capacity.
    lengths = np.random.default_rng(0).permutation(np.arange(70_000)) + 70_001
    bins = pack_bins(lengths, 140_001)
    assert bins.bin_of.tolist() == list(range(70_000))
    # Two to a bin: the greatest with the smallest.
    lengths = np.arange(1, 140_001)
    bins = pack_bins(lengths, 140_001)
    assert bins.count == 70_000
    assert bins.loads.tolist() == [140_001] * 70_000


@pytest.mark.parametrize("bound", [1, 100, 1 << 16, (1 << 16) + 1, 200_000, 1 << 33])
def test_the_radix_sort_of_any_width_is_the_stable_sort(bound: int) -> None:
    keys = np.random.default_rng(0).integers(bound - min(bound, 1000), bound, 5000)
    keys[::3] %= 1 << 16
    assert len(np.unique(keys)) < len(keys)
    expected = np.argsort(keys, kind="stable")
    assert binning_classes.stable_argsort(keys, bound).tolist() == expected.tolist()


def test_a_row_longer_than_the_capacity_is_named() -> None:
    message = r"row 1 needs 12 padded slots, more than the 10 .*1 more row.*13 slots"
    with pytest.raises(InputError, match=message):
        pack_bins(ints(3, 12, 13), 10)
    assert rows_of(pack_bins(ints(10, 10), 10)) == [[0], [1]]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (ints(3, 0), {}, "row 1 has 0 tokens"),
        (ints(3, -2), {}, "row 1 has -2 tokens"),
        (ints(3), {"capacity": 0}, "capacity is 0"),
        (ints(3), {"min_bins": 0}, "min-bins is 0"),
        (ints(3), {"bins_multiple_of": -1}, "bins-multiple-of is -1"),
        (ints(3), {"algorithm": "best"}, "algorithm is 'best'; it is one of concat, ffd"),
        (ints(3).reshape(1, 1), {}, r"shape \[1, 1\]"),
        (ints(), {}, "0 sequences cannot fill 1 bin "),
    ],
)
def test_what_cannot_be_packed_is_refused(
    lengths: Ints, options: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pack_bins(lengths, **({"capacity": 8} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("min_bins", "multiple", "missing"), [(5, 1, 2), (1, 4, 1), (4, 3, 3), (3, 5, 2)]
)
def test_too_few_rows_for_the_bins_wanted_says_how_many_are_missing(
    min_bins: int, multiple: int, missing: int
) -> None:
    with pytest.raises(InputError, match=f" {missing} sequences? missing"):
        pack_bins(ints(1, 1, 1), 8, min_bins=min_bins, bins_multiple_of=multiple)


def test_new_bins_take_rows_from_the_fullest_until_they_are_even() -> None:
    # One bin of 10. Half the difference is 5: the 4 moves (6 and 4), then the 1 (5 and 5).
    assert rows_of(pack_bins(ints(4, 3, 2, 1), 10)) == [[0, 1, 2, 3]]
    bins = pack_bins(ints(4, 3, 2, 1), 10, min_bins=2)
    assert rows_of(bins) == [[0, 3], [1, 2]]
    # Bins {9}, {5 5}, {4 3}: the fullest bin that has two rows gives.
    bins = pack_bins(ints(9, 5, 5, 4, 3), 10, bins_multiple_of=4)
    assert rows_of(bins) == [[0], [1], [2], [3, 4]]


def test_as_many_bins_as_rows_gives_each_row_its_own() -> None:
    lengths = log_normal(100)
    assert pack_bins(lengths, 8192).count < 50
    bins = pack_bins(lengths, 8192, min_bins=100)
    assert bins.bin_of.tolist() == list(range(100))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_multiple_of_bins_stays_balanced(algorithm: str) -> None:
    lengths = log_normal(400)
    plain = pack_bins(lengths, 8192, algorithm=algorithm)
    multiple = plain.count - 1
    bins = pack_bins(lengths, 8192, algorithm=algorithm, bins_multiple_of=multiple)
    assert bins.count == 2 * multiple
    assert_sound(bins, lengths)
    # A row of 8192 stays as full as it was; what can be shared out is.
    assert bins.loads.max() == lengths.max()
    assert np.median(bins.loads) >= 0.75 * bins.loads.mean()


def test_the_default_stays_within_a_thousandth_of_the_bound() -> None:
    lengths = log_normal(100_000)
    bins = pack_bins(lengths, 8192)
    bound = -(-int(lengths.sum()) // 8192)
    assert bound > 10_000
    assert bound <= bins.count <= 1.001 * bound


@pytest.mark.parametrize("algorithm", ["bfd", "ffd", "mffd", "concat"])
def test_memory_stays_at_a_few_bytes_a_row(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binning_classes, "CHUNK_ROWS", 1 << 14)
    lengths = log_normal(1_000_000)
    bins = pack_bins(lengths, 8192, algorithm=algorithm)
    assert bins.count > 100_000
    kept = bins.bin_of.nbytes + bins.order.nbytes + bins.offsets.nbytes + bins.loads.nbytes
    assert kept <= 12 * len(lengths)
    tracemalloc.start()
    pack_bins(lengths, 8192, algorithm=algorithm)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 20 * len(lengths)


def test_a_move_that_would_only_swap_two_loads_is_not_made() -> None:
    # 4 + 4 + 4 in one bin: the new bin takes row 0; with row 1 too it would be 4 and 8 again.
    found = pack_bins(np.array([4, 4, 4]), 12, algorithm="concat", min_bins=2)
    assert np.diff(found.offsets).tolist() == [1, 2]
    assert found.order.tolist() == [0, 1, 2]


@pytest.mark.parametrize("capacity", [2**31 - 1, 2**31, 2**32, 2**40])
@pytest.mark.parametrize("algorithm", ["concat", "ffd", "ffs", "mffd", "bfd"])
def test_capacities_past_int32_are_no_limit(capacity: int, algorithm: str) -> None:
    lengths = np.array([capacity, 1, capacity - 1, 5], dtype=np.int64)
    found = pack_bins(lengths, capacity, algorithm=algorithm)
    assert len(found.offsets) - 1 >= 3
    loads = np.add.reduceat(lengths[found.order], np.asarray(found.offsets)[:-1])
    assert loads.max() == capacity
    assert sorted(found.order.tolist()) == [0, 1, 2, 3]
