"""Two tensors, piece by piece: where they differ, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opdtool.checks.registry import check_name
from opdtool.findings import MAX_PLACES, Finding, Scalar


@dataclass(slots=True)
class Difference:
    """Running comparison of two tensors of one shape and dtype.

    Elements agree when they are equal, or both are finite and
    ``|actual - expected| <= atol + rtol * |expected|``. NaN agrees with nothing.
    """

    shape: tuple[int, ...]
    rtol: float = 0.0
    atol: float = 0.0
    mismatches: int = 0
    total: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nan: int = 0
    first: list[Mapping[str, Scalar]] = field(default_factory=list)

    def add(self, start: int, expected: Tensor, actual: Tensor) -> None:
        """Compare flat pieces [n] of both, the first element being number ``start``."""
        self.total += expected.numel()
        expected, actual = _comparable(expected), _comparable(actual)
        if torch.equal(expected, actual):  # one pass, no memory; NaN is not equal here either
            return
        at = (expected != actual).nonzero()[:, 0]
        left, right = expected[at].to(torch.float64), actual[at].to(torch.float64)
        # Inf minus inf is NaN: such a pair is unequal and within no tolerance.
        error, size = (right - left).abs(), left.abs()
        finite = error.isfinite()
        self.nan += int((left.isnan() | right.isnan()).sum())
        if bool(finite.any()):
            self.max_abs = max(self.max_abs, float(error[finite].max()))
            known = finite & (size > 0)
            if bool(known.any()):
                self.max_rel = max(self.max_rel, float((error[known] / size[known]).max()))
        # A tolerance of zero passes nothing unequal, not even integers that float64 confuses.
        wrong = at
        if self.rtol or self.atol:
            allowed = self.atol + self.rtol * size
            wrong = at[~(finite & size.isfinite() & (error <= allowed))]
        self.mismatches += wrong.numel()
        for index in wrong[: MAX_PLACES - len(self.first)].tolist():
            self.first.append(
                {
                    "index": self._index(start + index),
                    "expected": expected[index].item(),
                    "actual": actual[index].item(),
                }
            )

    def _index(self, flat: int) -> str:
        places = []
        for size in reversed(self.shape):
            flat, place = divmod(flat, size)
            places.append(place)
        return f"[{', '.join(map(str, reversed(places)))}]"

    def finding(self, tensor: str) -> Finding:
        """``same-values`` for this tensor."""
        if not self.mismatches:
            within = " within the tolerance" if self.max_abs else ""
            message = f"all values agree{within}"
            if self.max_abs:
                message += f"; the greatest difference is {self.max_abs:.6g}"
        else:
            message = (
                f"values differ; the greatest difference is {self.max_abs:.6g}, "
                f"relative {self.max_rel:.6g}"
            )
            if self.nan:
                message += f"; {self.nan:,} of the pairs hold NaN, which equals nothing"
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

    def stats(self) -> dict[str, Any]:
        """Plain figures for machine formats."""
        return {
            "mismatches": self.mismatches,
            "total": self.total,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
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
