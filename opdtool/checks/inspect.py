"""Figures of a tensor that is seen piece by piece, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from opdtool.checks.registry import check_name
from opdtool.core.words import plural
from opdtool.findings import Finding, Status

_WIDE = {torch.uint16: torch.int32, torch.uint32: torch.int64}


@dataclass(slots=True)
class Figures:
    """Running figures of a tensor: counts of NaN and infinities, and the extremes and the
    mean of the finite values. ``low``, ``high`` and ``mean`` are None where there is none."""

    numel: int = 0
    nan: int = 0
    inf: int = 0
    low: float | int | None = None
    high: float | int | None = None
    _sum: float = 0.0
    _finite: int = 0

    def add(self, piece: Tensor) -> None:
        """Count one more piece of the tensor, of any shape and dtype."""
        flat = piece.reshape(-1)
        self.numel += flat.numel()
        if flat.dtype.is_floating_point:
            flat = self._finite_values(flat)
        elif flat.dtype == torch.bool:
            flat = flat.to(torch.uint8)
        elif flat.dtype == torch.uint64:
            self._add_uint64(flat)
            return
        else:
            flat = flat.to(_WIDE.get(flat.dtype, flat.dtype))
        if flat.numel():
            low, high = (x.item() for x in torch.aminmax(flat))
            self._merge(low, high, flat.to(torch.float64).sum().item(), flat.numel())

    def _finite_values(self, flat: Tensor) -> Tensor:
        if flat.dtype.itemsize == 1:  # float8 knows few operations
            flat = flat.to(torch.float32)
        finite = torch.isfinite(flat)
        if bool(finite.all()):
            return flat
        nan = int(torch.isnan(flat).sum())
        self.nan += nan
        self.inf += flat.numel() - int(finite.sum()) - nan
        return flat[finite]

    def _add_uint64(self, flat: Tensor) -> None:
        array = flat.cpu().numpy()
        if array.size:
            self._merge(
                int(array.min()), int(array.max()), float(array.sum(dtype=float)), array.size
            )

    def _merge(self, low: float, high: float, total: float, count: int) -> None:
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self._sum += total
        self._finite += count

    @property
    def mean(self) -> float | None:
        """The mean of the finite values, accumulated in float64."""
        if not self._finite:
            return None
        mean = self._sum / self._finite
        return mean if math.isfinite(mean) else None


def check_finite(figures: Mapping[str, Figures], unread: Mapping[str, str]) -> list[Finding]:
    """``finite-values``: a warning for each tensor with NaN or infinities, else one pass; and
    what was not looked at, by its dtype in ``unread``, is skipped.

    A warning, not a failure: a logit of minus infinity may be meant as a mask.
    """
    seen = {name: f for name, f in figures.items() if name not in unread}
    bad = {name: f for name, f in seen.items() if f.nan or f.inf}
    found = [
        _finding("warn", f"holds {f.nan:,} NaN and {f.inf:,} infinities in {f.numel:,}", name)
        for name, f in bad.items()
    ]
    if seen and not bad:
        message = f"all values are finite in {plural(len(seen), 'tensor', ',')}"
        found.append(_finding("pass", message, None))
    return found + [
        _finding("skip", f"values of dtype {dtype} are not read", name)
        for name, dtype in unread.items()
    ]


def _finding(status: Status, message: str, tensor: str | None) -> Finding:
    return Finding(
        code="OPD943",
        name=check_name("OPD943"),
        status=status,
        message=message,
        tensor=tensor,
    )
