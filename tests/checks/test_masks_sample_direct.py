"""Which slots of a large dump are kept to screen faults on."""

from __future__ import annotations

import numpy as np
import pytest

from opdtool.checks.masks_sample import SCREENED, sample_slots, thinned

LARGE = 1_000_000
SMALL = 192 * 16
"""The most slots that are all kept."""


def slots(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_all_slots_of_a_small_dump_are_kept() -> None:
    assert sample_slots(0, []).tolist() == []
    assert sample_slots(SMALL, [slots(3)]).tolist() == list(range(SMALL))
    assert len(sample_slots(SMALL + 1, [slots(3)])) < SMALL
    assert len(sample_slots(33, [slots(3)], count=2)) < 33
    assert len(sample_slots(32, [slots(3)], count=2)) == 32


def test_a_stretch_around_each_mismatch_is_kept_in_order() -> None:
    wrong = [slots(500_000), slots(700_000, 700_100)]
    sample = sample_slots(LARGE, wrong)
    assert (np.diff(sample) > 0).all()
    kept = set(sample.tolist())
    for at in (500_000, 700_000, 700_100):
        assert {*range(at - 4, at + 12)} <= kept
        assert not {at - 5, at + 12} & kept
    assert len(sample) == pytest.approx((192 + 3) * 16, rel=0.02)
    assert sample.tolist() == sample_slots(LARGE, wrong).tolist()


def test_a_stretch_ends_where_the_dump_does() -> None:
    sample = sample_slots(LARGE, [slots(0, LARGE - 1)])
    assert sample[:12].tolist() == list(range(12))
    assert sample[-5:].tolist() == list(range(LARGE - 5, LARGE))


def test_without_mismatches_slots_at_random_are_kept() -> None:
    sample = sample_slots(LARGE, [])
    assert len(sample) == pytest.approx(192 * 16, rel=0.02)
    assert sample[0] > 0
    assert sample[0] < 50_000
    assert sample[-1] > LARGE - 50_000


def test_of_many_mismatches_as_many_different_ones_are_kept_as_said() -> None:
    wrong = np.arange(500, LARGE, 1000)
    sample = sample_slots(LARGE, [wrong])
    held = np.isin(wrong, sample).sum()
    assert len(wrong) == 1000
    assert 192 <= held < 210
    assert len(sample) == pytest.approx(2 * 192 * 16, rel=0.02)


def test_of_packs_past_the_screened_ones_little_is_kept() -> None:
    sample = np.arange(64)
    assert SCREENED == 12
    assert thinned(sample, 12) is sample
    few = thinned(sample, 13)
    assert few.tolist() == list(range(0, 64, 2))
    assert few.base is None  # the rest of the sample can be let go
    assert thinned(np.arange(10), 13).tolist() == list(range(10))
    assert thinned(np.arange(33), 13).tolist() == list(range(33))
