"""What packing, cutting, rolling and projecting mean, said slowly and without the core.

The equivalence suite compares the core with these. Each is one loop over sequences that one can
check by eye; nothing here imports the core's own arithmetic.

Legend: B rows, S row width, N segments, T slots of a pack, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def offsets(
    lengths: Sequence[int], multiple: int, total_multiple: int, tail: str
) -> tuple[list[int], list[int]]:
    """(cu_seqlens, cu_seqlens_padded) of sequences each padded up to a multiple, and the pack's
    total to another, the rest joining the last sequence or becoming a segment of its own."""
    real, padded = [0], [0]
    for length in lengths:
        slots = length
        while slots % multiple:
            slots += 1
        real.append(real[-1] + length)
        padded.append(padded[-1] + slots)
    rest = 0
    while (padded[-1] + rest) % total_multiple:
        rest += 1
    if rest and tail == "segment":
        real.append(real[-1])
        padded.append(padded[-1] + rest)
    elif rest:
        padded[-1] += rest
    return real, padded


def packed(rows: Array, lengths: Sequence[int], cu_padded: Sequence[int], shift: int) -> Array:
    """The whole pack [T, ...]: each row's real tokens, zeros behind, rolled by ``shift``."""
    out = np.zeros((cu_padded[-1], *rows.shape[2:]), dtype=rows.dtype)
    for b, length in enumerate(lengths):
        start, stop = cu_padded[b], cu_padded[b + 1]
        segment = np.zeros((stop - start, *rows.shape[2:]), dtype=rows.dtype)
        segment[:length] = rows[b, :length]
        out[start:stop] = np.roll(segment, shift, axis=0)
    return out


def window(length: int, rank: int, size: int) -> list[int]:
    """The positions of a segment that a context-parallel rank holds, in its order.

    length 8, size 2:   rank 0 holds 0 1 6 7,  rank 1 holds 2 3 4 5
    """
    if size == 1:
        return list(range(length))
    chunk = length // (2 * size)
    chunks = [list(range(c * chunk, (c + 1) * chunk)) for c in range(2 * size)]
    return chunks[rank] + chunks[2 * size - 1 - rank]


def shard_slots(cu_padded: Sequence[int], rank: int, size: int) -> list[int]:
    """The slots of the pack that a context-parallel rank holds, in its order."""
    slots: list[int] = []
    for start, stop in pairwise(cu_padded):
        slots += [start + p for p in window(stop - start, rank, size)]
    return slots


def rolled(pack: Array, cu_padded: Sequence[int]) -> Array:
    """The pack [T] shifted left by one in each segment, the last slot of each zero."""
    out = np.zeros_like(pack)
    for start, stop in pairwise(cu_padded):
        if stop > start:
            out[start : stop - 1] = pack[start + 1 : stop]
    return out


def draft_mask(weights: Array, lengths: Sequence[int], cu_padded: Sequence[int]) -> Array:
    """The global mask [T]: slot t of a sequence holds the weight of its token t + 1."""
    out = np.zeros(cu_padded[-1], dtype=weights.dtype)
    for b, length in enumerate(lengths):
        start = cu_padded[b]
        out[start : start + max(length - 1, 0)] = weights[b, 1 : max(length, 1)]
    return out


def products(hidden: Array, heads: Sequence[Array], teacher: Sequence[int]) -> Array:
    """Logits [B, S, V] in float64: every row by its own teacher's head [V, H]."""
    out = [
        hidden[b].astype(np.float64) @ heads[t].astype(np.float64).T for b, t in enumerate(teacher)
    ]
    return np.stack(out)


def product_bound(hidden: Array, head: Array, reference: Array, eps: float) -> Array:
    """How far a product may be from ``reference`` [B, S, V]: the rounding of its dtype (eps),
    and of two float32 sums in different orders (contract 5.4)."""
    x = np.sqrt((hidden.astype(np.float64) ** 2).sum(-1))[..., None]
    w = np.sqrt((head.astype(np.float64) ** 2).sum(-1))
    root = float(np.sqrt(hidden.shape[-1]))
    bound: Array = eps * np.abs(reference) + 8 * 2.0**-23 * root * x * w + 2.0**-126
    return bound


def columns(logits: Array, d2t: Sequence[int]) -> Array:
    """[..., D]: draft class i is column i + d2t[i]."""
    return np.stack([logits[..., i + offset] for i, offset in enumerate(d2t)], axis=-1)


def column_gradients(weights: Array, d2t: Sequence[int], vocab: int) -> Array:
    """[..., V]: the gradient of sum(weights * columns): each weight added to its column."""
    out = np.zeros((*weights.shape[:-1], vocab), dtype=weights.dtype)
    for i, offset in enumerate(d2t):
        out[..., i + offset] += weights[..., i]
    return out
