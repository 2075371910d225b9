"""Dump slots on which faults are screened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opdtool.checks.recipes import Ints


def sample_slots(total: int, wrong: Sequence[Ints], count: int = 2048) -> Ints:
    """Mismatches, their neighbours and others at random, sorted; all slots of a small dump.

    ``wrong`` are the mismatches, thinned out where there are many.
    """
    if total <= 2 * count:
        return np.arange(total, dtype=np.int64)
    rng = np.random.default_rng(5)
    bad = np.concatenate([*wrong, np.zeros(0, dtype=np.int64)])
    if len(bad) > count:
        bad = rng.choice(bad, count, replace=False)
    near = np.concatenate([bad[:512] - 1, bad[:512] + 1])
    other = rng.integers(total, size=count, dtype=np.int64)
    slots = np.unique(np.concatenate([bad, near, other]))
    return slots[(slots >= 0) & (slots < total)]
