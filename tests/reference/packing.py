"""Packing stated slowly: plain Python loops over sequences and slots, numpy arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


def pad_length(length: int, multiple: int) -> int:
    """The least multiple that is not below ``length``."""
    while length % multiple:
        length += 1
    return length


def padded_lengths(
    lengths: Sequence[int], multiple: int, total_multiple: int = 1, total: int | None = None
) -> tuple[list[int], int]:
    """Each length padded, and the tail that brings their sum to its own target."""
    padded = [pad_length(length, multiple) for length in lengths]
    want = total if total is not None else pad_length(sum(padded), total_multiple)
    return padded, want - sum(padded)


def cumulative(lengths: Sequence[int]) -> list[int]:
    """0, then each running sum."""
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def zigzag_positions(length: int, rank: int, size: int) -> list[int]:
    """The positions of a segment that one rank owns, in its order."""
    if size == 1:
        return list(range(length))
    chunk = length // (2 * size)
    front = [rank * chunk + i for i in range(chunk)]
    back = [(2 * size - 1 - rank) * chunk + i for i in range(chunk)]
    return front + back


def pack(
    rows: np.ndarray[Any, Any],
    cu_seqlens: Sequence[int],
    cu_seqlens_padded: Sequence[int],
    rank: int = 0,
    size: int = 1,
    shift: int = 0,
) -> np.ndarray[Any, Any]:
    """One rank's slots [T/size, ...], one segment and one slot after the other."""
    S = rows.shape[1]
    out: list[Any] = []
    zero = np.zeros(rows.shape[2:], dtype=rows.dtype)
    for b in range(len(cu_seqlens) - 1):
        actual = cu_seqlens[b + 1] - cu_seqlens[b]
        width = cu_seqlens_padded[b + 1] - cu_seqlens_padded[b]
        segment = [zero] * width
        if b < len(rows):
            for i in range(min(actual, S)):
                segment[i] = rows[b, i]
        rolled = [segment[(i - shift) % width] for i in range(width)]
        out.extend(rolled[i] for i in zigzag_positions(width, rank, size))
    return np.array(out, dtype=rows.dtype).reshape(len(out), *rows.shape[2:])


def draft_mask(
    token_mask: np.ndarray[Any, Any],
    sample_mask: np.ndarray[Any, Any],
    cu_seqlens: Sequence[int],
    cu_seqlens_padded: Sequence[int],
) -> np.ndarray[Any, Any]:
    """The global mask [T]: slot t has the weight of token t+1 of its sequence, else zero."""
    out = np.zeros(cu_seqlens_padded[-1], dtype=np.result_type(token_mask, sample_mask))
    for b in range(len(token_mask)):
        actual = min(cu_seqlens[b + 1] - cu_seqlens[b], token_mask.shape[1])
        for i in range(actual - 1):
            out[cu_seqlens_padded[b] + i] = token_mask[b, i + 1] * sample_mask[b]
    return out


def positions(cu_seqlens_padded: Sequence[int], rank: int = 0, size: int = 1) -> list[int]:
    """Position ids of one rank's slots."""
    out: list[int] = []
    for begin, end in pairwise(cu_seqlens_padded):
        out.extend(zigzag_positions(end - begin, rank, size))
    return out
