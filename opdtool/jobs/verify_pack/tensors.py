"""The tensors of a pack's files: their shapes, reading their slots, showing their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.masks import Count
from opdtool.core.errors import InputError
from opdtool.io.tensors import TensorInfo
from opdtool.jobs.dump_files import DumpFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed tensor's shape in one file: its slots, and the dimensions of a token."""

    slots: int
    token: tuple[int, ...]
    leading: bool

    @classmethod
    def of(cls, info: TensorInfo, token: tuple[int, ...]) -> Packed | None:
        """Shape [1,T,...] or [T,...] with tokens of this shape; None for any other."""
        shape = info.shape
        if shape[:1] == (1,) and shape[2:] == token and len(shape) >= 2:
            return cls(slots=shape[1], token=token, leading=True)
        if shape and shape[1:] == token:
            return cls(slots=shape[0], token=token, leading=False)
        if not token and len(shape) == 2 and shape[1] == 1:
            return cls(slots=shape[0], token=(), leading=False)
        return None


def packed_shape(files: DumpFiles, path: Path, name: str, token: tuple[int, ...]) -> Packed:
    info = files.source(path).require(name)
    packed = Packed.of(info, token)
    if packed is None:
        extra = "".join(f",{size}" for size in token)
        raise InputError(
            f"{path}: {name} has shape {list(info.shape)}; expected [1,T{extra}] or [T{extra}]"
        )
    return packed


def slots_by(shapes: Mapping[str, Sequence[Packed]], padded: Tensor | None) -> str:
    """The tensor whose slots are the pack's: the first with as many as the padded offsets say,
    evenly shared by the ranks, else the first."""
    end = None
    if padded is not None and padded.numel() and not padded.is_floating_point():
        end = int(padded.reshape(-1)[-1])
    for name, pieces in shapes.items():
        sizes = [piece.slots for piece in pieces]
        if sum(sizes) == end and len(set(sizes)) == 1:
            return name
    return next(iter(shapes))


def slot_reader(
    files: DumpFiles, path: Path, name: str, shape: Packed
) -> Callable[[int, int], Tensor]:
    """Reads local slots [start, stop) of a tensor as [n, ...]."""

    return partial(_read_slots, files, path, name, shape)


def _read_slots(
    files: DumpFiles, path: Path, name: str, shape: Packed, start: int, stop: int
) -> Tensor:
    source = files.source(path)
    if shape.leading:
        return source.read(name, slice(0, 1), slice(start, stop))[0]
    return source.read(name, slice(start, stop)).reshape(stop - start, *shape.token)


def as_floats(count: Count, wide: bool) -> None:
    """Places' keys turned back into the floats that they stand for."""

    def value(key: float) -> float:
        bits = np.array([key], dtype=np.int64)
        if wide:
            return float(bits.view(np.float64)[0])
        return float(bits.astype(np.int32).view(np.float32)[0])

    count.first = [(slot, value(want), value(have)) for slot, want, have in count.first]


def moved(found: Tensor, expected: Tensor) -> bool:
    """Whether values are the same bits, a NaN included, or else equal.

    In another dtype they are the same numbers: each side survives the other's dtype.
    """
    if found.dtype == expected.dtype:
        return _same(found, expected)
    signed = [one for one in (found, expected) if one.dtype.is_signed]
    if len(signed) == 1 and bool((signed[0] < 0).any()):
        return False  # unsigned integers and bools would take it modulo their size
    there, back = found.to(expected.dtype), expected.to(found.dtype)
    return _same(there, expected) and _same(back, found)


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether tensors of one dtype hold the same bits, or equal numbers."""
    pair = [one.contiguous().reshape(-1).view(torch.uint8) for one in (left, right)]
    if torch.equal(*pair):
        return True
    narrow = left.is_floating_point() and left.dtype.itemsize == 1  # torch compares no float8
    return torch.equal(left.float(), right.float()) if narrow else torch.equal(left, right)
