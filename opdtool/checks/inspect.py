"""Figures of a tensor that is seen piece by piece, and what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opdtool.checks.registry import check_name
from opdtool.core.words import plural
from opdtool.findings import Finding

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


def check_finite(figures: dict[str, Figures]) -> list[Finding]:
    """``finite-values``: a warning for each tensor with NaN or infinities, else one pass.

    A warning, not a failure: a logit of minus infinity may be meant as a mask.
    """
    bad = {name: f for name, f in figures.items() if f.nan or f.inf}
    if not bad:
        message = f"all values are finite in {plural(len(figures), 'tensor', ',')}"
        return [_finding("pass", message, None)] if figures else []
    return [
        _finding("warn", f"holds {f.nan:,} NaN and {f.inf:,} infinities in {f.numel:,}", name)
        for name, f in bad.items()
    ]


def _finding(status: str, message: str, tensor: str | None) -> Finding:
    return Finding(
        code="OPD943",
        name=check_name("OPD943"),
        status="warn" if status == "warn" else "pass",
        message=message,
        tensor=tensor,
    )
