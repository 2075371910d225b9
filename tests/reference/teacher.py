"""Slow, obvious references for rebuilt teacher logits: loops over rows, positions, columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def owned_positions(length: int, cp_rank: int, cp_size: int) -> list[int]:
    """The positions of a segment that a rank owns, by dealing chunks out and back."""
    if cp_size == 1:
        return list(range(length))
    chunk = length // (2 * cp_size)
    assert chunk * 2 * cp_size == length
    dealt: list[list[int]] = [[] for _ in range(cp_size)]
    order = [*range(cp_size), *reversed(range(cp_size))]
    for number, rank in enumerate(order):
        dealt[rank].extend(range(number * chunk, (number + 1) * chunk))
    return dealt[cp_rank]


def logits_of(hidden: Floats, heads: Mapping[int, Floats], index: Sequence[int]) -> Floats:
    """[B, S, V]: each row through its head, one dot product at a time."""
    B, S, _ = hidden.shape
    V = len(next(iter(heads.values())))
    out = np.zeros((B, S, V))
    for b in range(B):
        for s in range(S):
            for v in range(V):
                out[b, s, v] = float(np.dot(hidden[b, s], heads[index[b]][v]))
    return out


def shard_of(
    logits: Floats, *, tp_rank: int, tp_size: int, cp_rank: int, cp_size: int, padded: int
) -> Floats:
    """[B, padded / cp, V / tp]: one rank's share of whole logits [B, S, V], zero past S."""
    B, S, V = logits.shape
    width = V // tp_size
    out = []
    for b in range(B):
        row = []
        for position in owned_positions(padded, cp_rank, cp_size):
            columns = range(tp_rank * width, (tp_rank + 1) * width)
            row.append([logits[b, position, v] if position < S else 0.0 for v in columns])
        out.append(row)
    return np.array(out).reshape(B, padded // cp_size, width)
