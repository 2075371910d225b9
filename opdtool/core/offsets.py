"""Cumulative lengths, runs of neighbouring slots, and the context-parallel window.

The small vocabulary that layouts, packing and checks are written in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.words import plural

Ints = npt.NDArray[np.int64]
CuSeqlens = Sequence[int] | Tensor | Ints


def as_offsets(values: CuSeqlens, name: str = "cu_seqlens") -> Ints:
    """Cumulative lengths (or lengths, or row numbers) as an int64 array [N].

    A tensor costs one synchronisation. ``name`` begins every refusal.

    Raises:
        InputError: no vector, no integers (bool is none), or one past int64. A cast would
            take each of them for another number in silence.
    """
    if isinstance(values, Tensor):
        if not _is_integer(values.dtype):
            raise InputError(f"{name} holds {values.dtype}; expected integers")
        found = values.detach().cpu().numpy()
    elif isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu":
            raise InputError(f"{name} holds {values.dtype}; expected integers")
        found = values
    else:
        found = _array_of(values, name)
    if found.ndim != 1:
        raise InputError(f"{name} has shape {list(found.shape)}; expected a vector of integers")
    if found.dtype == np.uint64 and len(found) and found.max() > _LARGEST:
        _refuse_past_int64(name, found.tolist())
    return np.ascontiguousarray(found, dtype=np.int64)


_LARGEST = np.iinfo(np.int64).max


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _refuse_past_int64(name: str, values: Sequence[int]) -> NoReturn:
    at = next(i for i, value in enumerate(values) if not -_LARGEST - 1 <= value <= _LARGEST)
    raise InputError(f"{name} holds {values[at]} at entry {at}, past int64")


def _array_of(values: Sequence[int], name: str) -> npt.NDArray[Any]:
    """A Python sequence as an integer array. numpy takes True for 1, and integers that no
    dtype of its own holds for floats or objects."""
    try:
        found: npt.NDArray[Any] = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{name} is no vector of integers") from error
    if found.size == 0 or found.ndim != 1:
        return found.astype(np.int64) if found.size == 0 else found
    none = (bool, np.bool_)
    if found.dtype.kind in "iu" and not set(map(type, values)).intersection(none):
        return found
    for value in values:
        if isinstance(value, none) or not hasattr(value, "__index__"):
            raise InputError(f"{name} holds {type(value).__name__}; expected integers")
    _refuse_past_int64(name, values)


def runs(start: Ints, count: Ints) -> Ints:
    """The integers start[i], start[i] + 1, ... of every run, one run after the other.

    Counts are at least 1. Steps of one, and at each run's beginning the jump that leads
    there, summed up: no loop, one pass.

        start 5 0, count 2 3:   5 6 0 1 2
    """
    if not len(start):
        return np.empty(0, dtype=np.int64)
    steps = np.ones(int(count.sum()), dtype=np.int64)
    steps[0] = start[0]
    steps[np.cumsum(count)[:-1]] = start[1:] - start[:-1] - count[:-1] + 1
    return np.cumsum(steps, out=steps)


def cp_window(length: int, cp_rank: int, cp_size: int) -> tuple[slice, slice]:
    """The two slices of a segment that one context-parallel rank owns.

    A segment of ``length`` slots is cut into ``2 * cp_size`` equal chunks; rank r owns chunk
    r and chunk ``2 * cp_size - 1 - r``, so that causal attention costs every rank the same.

        length 8, cp_size 2:   0 1 | 2 3 | 4 5 | 6 7
                      rank:     0  |  1  |  1  |  0

    With ``cp_size`` 1 the first slice is the whole segment and the second is empty.

    Raises:
        InputError: ``length`` is not a multiple of ``2 * cp_size``, or the rank is none.
    """
    check_cp_rank(cp_rank, cp_size)
    if cp_size == 1:
        return slice(0, length), slice(length, length)
    chunk, rest = divmod(length, 2 * cp_size)
    if rest:
        raise InputError(
            f"a segment of {plural(length, 'slot')} cannot be cut for cp_size {cp_size}: "
            f"its length must be a multiple of {2 * cp_size}"
        )
    last = 2 * cp_size - 1 - cp_rank
    return (
        slice(cp_rank * chunk, (cp_rank + 1) * chunk),
        slice(last * chunk, (last + 1) * chunk),
    )


def check_cp_rank(cp_rank: int, cp_size: int) -> None:
    """Refuse a context-parallel size below 1 or a rank outside it."""
    if cp_size < 1:
        raise InputError(f"cp_size is {cp_size}; it must be at least 1")
    if not 0 <= cp_rank < cp_size:
        raise InputError(f"cp_rank is {cp_rank}, outside 0..{cp_size - 1} for cp_size {cp_size}")


def check_cp_multiple(padded_lengths: Ints, cp_size: int) -> None:
    """Refuse padded lengths [N] that cannot be cut into 2 * cp_size chunks, naming the first."""
    if cp_size == 1:
        return
    uneven = np.flatnonzero(padded_lengths % (2 * cp_size))
    if len(uneven):
        b = int(uneven[0])
        raise InputError(
            f"sequence {b} has a padded length of {padded_lengths[b]}, which is not a multiple "
            f"of {2 * cp_size} (2 x cp_size {cp_size}); pad every sequence to one"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Runs of neighbouring slots that are filled from neighbouring tokens of one row.

    Sorted by ``dst``; slots that no piece covers are zero. All arrays are int64 [P].
    """

    dst: Ints
    """First local slot of the run."""
    segment: Ints
    """Which segment the run belongs to."""
    position: Ints
    """First position in the segment (so in the row) that the run is filled from."""
    count: Ints
    """How many slots."""

    def clip(self, first: int, stop: int) -> Pieces:
        """The parts that are filled from positions [first, stop) of their rows."""
        begin = np.maximum(self.position, first)
        count = np.minimum(self.position + self.count, stop) - begin
        keep = count > 0
        return Pieces(
            dst=(self.dst + begin - self.position)[keep],
            segment=self.segment[keep],
            position=begin[keep],
            count=count[keep],
        )


def check_offsets(name: str, offsets: Ints) -> None:
    """Refuse what is no vector of cumulative lengths [N+1]; ``name`` begins the refusal."""
    if offsets.ndim != 1 or len(offsets) < 1:
        raise InputError(f"{name} has shape {list(offsets.shape)}; expected [N+1] with N >= 0")
    if offsets[0] != 0:
        raise InputError(f"{name} starts at {offsets[0]}; cumulative lengths start at 0")
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls):
        b = int(falls[0])
        raise InputError(
            f"{name} falls from {offsets[b]} to {offsets[b + 1]} at entry {b + 1}; "
            f"cumulative lengths never fall"
        )


def cumulative(lengths: Ints) -> Ints:
    """The cumulative lengths [N+1] of lengths [N], from 0."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
