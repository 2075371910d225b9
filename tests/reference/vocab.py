"""Slow and obvious: what the draft vocabulary's maps say, one entry at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


def mapped(logits: npt.NDArray[np.float64], offsets: Sequence[int]) -> npt.NDArray[np.float64]:
    """[..., D]: column i is column ``i + offsets[i]``."""
    out = np.zeros((*logits.shape[:-1], len(offsets)))
    for i, offset in enumerate(offsets):
        target = i + int(offset)
        assert 0 <= target < logits.shape[-1]
        out[..., i] = logits[..., target]
    return out


def mapped_gradient(
    grad: npt.NDArray[np.float64], offsets: Sequence[int], vocab_size: int
) -> npt.NDArray[np.float64]:
    """[..., V]: every draft column's gradient, added to the column it came from."""
    out = np.zeros((*grad.shape[:-1], vocab_size))
    for i, offset in enumerate(offsets):
        out[..., i + int(offset)] += grad[..., i]
    return out


def most_frequent(tokens: Iterable[int], vocab_size: int, size: int) -> list[int]:
    """The ``size`` commonest ids, ties to the lower id, filled from the lowest, ascending."""
    counted = Counter(tokens)
    ranked = sorted(range(vocab_size), key=lambda token: (-counted[token], token))
    return sorted(ranked[:size])
