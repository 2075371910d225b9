"""Dump slots on which faults are screened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opdtool.checks.recipes import Ints

BEFORE, AFTER = 4, 12
"""Slots of a stretch around each place that is looked at."""


def sample_slots(total: int, wrong: Sequence[Ints], count: int = 192) -> Ints:
    """Stretches around mismatches and around other slots at random, sorted; all slots of a
    small dump.

    Stretches, for what is near each other comes from few rows of the batch, which can be kept
    at hand. ``wrong`` are the mismatches, thinned out where there are many.
    """
    if total <= (BEFORE + AFTER) * count:
        return np.arange(total, dtype=np.int64)
    rng = np.random.default_rng(5)
    bad = np.concatenate([*wrong, np.zeros(0, dtype=np.int64)])
    if len(bad) > count:
        bad = rng.choice(bad, count, replace=False)
    other = rng.integers(total, size=count, dtype=np.int64)
    around = np.arange(-BEFORE, AFTER, dtype=np.int64)
    slots = np.unique(np.concatenate([bad, other])[:, None] + around)
    return slots[(slots >= 0) & (slots < total)]


SCREENED = 12
"""Packs on whose samples faults are screened."""


def thinned(sample: Ints, failing: int) -> Ints:
    """The sample of a pack that is the ``failing``-th to fail, counted from 1: of packs that no
    fault is screened on little is kept, for there may be many thousands."""
    return sample if failing <= SCREENED else sample[:: max(1, len(sample) // 32)].copy()
