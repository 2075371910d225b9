"""Two tensors, piece by piece: where they differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.registry import check_name
from opdtool.findings import MAX_PLACES, Finding, Scalar

PIECE = 1 << 15
"""Elements that differ are looked at so many at a time: what is made of them stays in a cache."""
Errors = np.ndarray[tuple[int], Any]
"""Distances and sizes of the elements that differ: float64, or uint64 for integers, which
holds the distance of any two exactly."""


@dataclass(slots=True)
class Difference:
    """Running comparison of two tensors of one shape and dtype.

    Elements agree when they are equal, or both are finite and
    ``|actual - expected| <= atol + rtol * |expected|``. NaN agrees with nothing. Integers
    are compared as integers, of whatever size.

    ``max_abs`` is the greatest distance, ``max_rel`` the greatest in terms of an expected
    value that is not zero; infinite where a pair is infinitely far apart, as are infinity and
    a number. ``nan`` and ``infinite`` count the pairs with NaN and those infinitely apart.
    """

    shape: tuple[int, ...]
    rtol: float = 0.0
    atol: float = 0.0
    mismatches: int = 0
    total: int = 0
    nan: int = 0
    infinite: int = 0
    first: list[Mapping[str, Scalar]] = field(default_factory=list)
    _abs: float | int = 0
    _rel: float = 0.0

    def add(self, start: int, expected: Tensor, actual: Tensor) -> None:
        """Compare flat pieces [n] of both, the first element being number ``start``."""
        self.total += expected.numel()
        if torch.equal(*map(_comparable, (expected, actual))):  # one pass; NaN is not equal here
            return
        for first in range(0, expected.numel(), PIECE):
            piece = slice(first, first + PIECE)
            self._add_differing(start + first, expected[piece], actual[piece])

    def _add_differing(self, start: int, expected: Tensor, actual: Tensor) -> None:
        left, right = _comparable(expected), _comparable(actual)
        if torch.equal(left, right):
            return
        at = (left != right).nonzero()[:, 0]
        error, size = _distances(expected[at].cpu(), actual[at].cpu())
        finite = np.isfinite(error)
        self.nan += int(np.isnan(error).sum())
        self.infinite += int(np.isinf(error).sum())
        if finite.any():
            self._abs = max(self._abs, error[finite].max().item())
            known = finite & (size > 0)
            if known.any():
                self._rel = max(self._rel, float((error[known] / size[known]).max()))
        wrong = np.arange(len(error))
        if self.rtol or self.atol:
            wrong = wrong[~(finite & np.isfinite(size) & self._within(error, size))]
        self.mismatches += len(wrong)
        for index in at.cpu()[wrong[: MAX_PLACES - len(self.first)]].tolist():
            self.first.append(
                {
                    "index": self._index(start + index),
                    "expected": expected[index].item(),
                    "actual": actual[index].item(),
                }
            )

    def _within(self, error: Errors, size: Errors) -> Any:
        """Where the tolerance allows the error."""
        with np.errstate(invalid="ignore", over="ignore"):  # infinity times zero
            allowed = self.atol + self.rtol * size.astype(np.float64)
        if error.dtype != np.uint64:
            return error <= allowed
        # Not as floats: from 2^53 on they confuse neighbours.
        most = np.floor(allowed)
        beyond = most >= 2.0**64
        return beyond | (error <= np.where(beyond, 0, most).astype(np.uint64))

    @property
    def max_abs(self) -> float | int:
        return float("inf") if self.infinite else self._abs

    @property
    def max_rel(self) -> float:
        return float("inf") if self.infinite else self._rel

    def _index(self, flat: int) -> str:
        places = []
        for size in reversed(self.shape):
            flat, place = divmod(flat, size)
            places.append(place)
        return f"[{', '.join(map(str, reversed(places)))}]"

    def finding(self, tensor: str) -> Finding:
        """``same-values`` for this tensor."""
        if not self.mismatches:
            message = "all values agree"
            if self._abs:
                message += f" within the tolerance; the greatest difference is {_figure(self._abs)}"
        else:
            message = "; ".join(["values differ", *self._figures()])
        return Finding(
            code="OPD953",
            name=check_name("OPD953"),
            status="fail" if self.mismatches else "pass",
            message=message,
            tensor=tensor,
            mismatches=self.mismatches,
            total=self.total,
            first=tuple(self.first),
        )

    def _figures(self) -> Iterator[str]:
        if self._abs:
            of = " of finite pairs" if self.nan or self.infinite else ""
            relative = f", relative {self._rel:.6g}" if self._rel else ""
            yield f"the greatest difference{of} is {_figure(self._abs)}{relative}"
        if self.infinite:
            yield f"{_pairs(self.infinite, 'is', 'are')} infinitely far apart"
        if self.nan:
            yield f"{_pairs(self.nan, 'holds', 'hold')} NaN, which equals nothing"

    def stats(self) -> dict[str, Any]:
        """Plain figures for machine formats."""
        return {
            "mismatches": self.mismatches,
            "total": self.total,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "nan": self.nan,
            "infinite": self.infinite,
        }


def _comparable(tensor: Tensor) -> Tensor:
    """The values in a dtype that can be compared and widened without loss."""
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64)
    if tensor.dtype in (torch.uint16, torch.uint32):
        return tensor.to(torch.int64)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.to(torch.float32)
    return tensor


def _distances(expected: Tensor, actual: Tensor) -> tuple[Errors, Errors]:
    """``|actual - expected|`` and ``|expected|`` of elements [n] that are not equal."""
    if expected.dtype.is_floating_point:
        left, right = expected.to(torch.float64).numpy(), actual.to(torch.float64).numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            # Infinity minus its like is no number, but these two are not alike.
            return np.abs(right - left), np.abs(left)
    wide = np.uint64 if expected.dtype == torch.uint64 else np.int64
    left, right = expected.numpy().astype(wide), actual.numpy().astype(wide)
    # Modulo 2^64 the greater less the smaller is the distance, also where int64 overflows.
    distance = np.maximum(left, right).astype(np.uint64) - np.minimum(left, right).astype(np.uint64)
    size = left if wide is np.uint64 else np.where(left < 0, -left, left)
    return distance, size.astype(np.uint64)


def _figure(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _pairs(count: int, one: str, many: str) -> str:
    return f"1 pair {one}" if count == 1 else f"{count:,} pairs {many}"
