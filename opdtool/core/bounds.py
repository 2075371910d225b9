"""How far a right reconstruction may be from recorded logits, and what precision those had.

The bound (contract 5.4) that a right reconstruction always meets, element by element:

    |a - ref| <= relative * |ref| + accumulation * |x| * |w| + operand * |x|_4 * |w|_4 + absolute

``relative`` is what the reference's own dtype rounds away, ``accumulation`` what two float32
sums in different orders differ by, ``operand`` what a rounding of the hidden states before the
product leaves (a final norm, a cast to the head's dtype). See docs/tolerance.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

TINY = float(torch.finfo(torch.float32).tiny)
BIG = float(torch.finfo(torch.float32).max)
EPS = float(torch.finfo(torch.float32).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBound:
    """How far a rebuilt logit may be from a recorded one; see the module."""

    relative: float = 0.0
    accumulation: float = 0.0
    operand: float = 0.0
    absolute: float = TINY
    given: bool = False
    """Whether the user gave it (``--rtol``, ``--atol``), rather than the bound being derived."""

    def scaled(self, factor: float) -> ErrorBound:
        """The bound of logits that are multiplied by ``factor`` after the product."""
        return ErrorBound(
            relative=self.relative,
            accumulation=self.accumulation * abs(factor),
            operand=self.operand * abs(factor),
            absolute=max(self.absolute * abs(factor), TINY),
        )

    def describe(self) -> str:
        """The bound as a formula, its numbers filled in."""
        parts = [f"{self.relative:.4g}*|ref|"] if self.relative else []
        if self.accumulation:
            parts.append(f"{self.accumulation:.4g}*|x|*|w|")
        if self.operand:
            parts.append(f"{self.operand:.4g}*|x|_4*|w|_4")
        if self.absolute > TINY or not parts:
            parts.append(f"{0.0 if self.absolute <= TINY else self.absolute:.4g}")
        return "|a-ref| <= " + " + ".join(parts)


def given_bound(rtol: float | None, atol: float | None) -> ErrorBound:
    """|a - ref| <= atol + rtol * |ref|; one that is left out is 0."""
    return ErrorBound(relative=rtol or 0.0, absolute=max(atol or 0.0, TINY), given=True)


def derived_bound(
    *,
    width: int,
    reference: torch.dtype,
    roundings: int = 1,
    operand: torch.dtype | None = None,
    operand_roundings: int = 1,
    scale: float = 1.0,
) -> ErrorBound:
    """The bound that every right reconstruction meets, for a head of ``width`` H.

    ``reference`` is the precision of the recorded logits; ``roundings`` how often that dtype
    may have rounded them (once after the product, once more for each operation behind it).
    ``operand`` is a dtype that the hidden states are rounded to before the product, if any;
    ``scale`` multiplies the product. ``width`` 0 is for logits that no product made.
    """
    info = torch.finfo(reference)
    # One unit of the last place covers two roundings to nearest of half a unit each.
    relative = max(info.eps, EPS) * max(2, roundings) / 2 * (1 + 8 * info.eps)
    # Two sums of H products differ by at most H units whatever their order; 8 sqrt(H) units
    # are less from H = 64 on, and far more than orders in use come to.
    accumulation = min(8 * sqrt(width), width + 2) * EPS * abs(scale) if width else 0.0
    # Independent roundings add up to a deviation of at most half a unit times |x o w|, which
    # |x|_4 |w|_4 bounds; sixteen deviations are never reached.
    unit = torch.finfo(operand).eps / 2 if operand is not None else 0.0
    rounded = 8 * unit * sqrt(operand_roundings) * abs(scale)
    smallest = info.smallest_normal * info.eps
    return ErrorBound(
        relative=relative,
        accumulation=accumulation,
        operand=rounded,
        absolute=max(smallest * max(1.0, abs(scale)), TINY),
    )


def stored_precision(values: Tensor) -> torch.dtype:
    """The coarsest dtype that holds ``values`` exactly: a float32 or float16 file may hold
    logits that were bfloat16 before. Zeros and infinities tell nothing, and a few wrong
    values among many do not hide what the others are."""
    telling = values[values.isfinite() & (values != 0)]
    if values.dtype == torch.bfloat16 or len(telling) == 0:
        return values.dtype
    for narrow in (torch.bfloat16, torch.float16):
        if _nearly_all(telling.to(narrow).to(values.dtype) == telling):
            return narrow
    return values.dtype


def precision_behind(
    values: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> torch.dtype:
    """The coarsest dtype that the logits had at any step of softcap(scale * logits).

    A model may widen its logits before it transforms them: then what is recorded holds no
    narrow numbers, but what it was made of did. Each step is undone, in float64, where that
    moves a rounding of what is recorded by much less than a narrow number's spacing.
    """
    found = stored_precision(values)
    if values.dtype.itemsize < 4 or found == torch.bfloat16 or (scale is None and softcap is None):
        return found
    recorded = values[values.isfinite() & (values != 0)].double()
    steps: list[tuple[Tensor, Tensor]] = []
    step, off = recorded, recorded.abs() * (8 * torch.finfo(values.dtype).eps)
    if softcap is not None:
        step, off = step / softcap, off / softcap
        # Nothing can be told of what a tanh has flattened.
        steep = step.abs() < 0.99
        step, off = step[steep], off[steep]
        steps.append((step, off))
        off = off / (1 - step.square())
        step = step.atanh()
        steps += [(step, off), (step * softcap, off * softcap)]
        step, off = steps[-1]
    if scale is not None:
        steps.append((step / scale, off / scale))
    for narrow in (torch.bfloat16, torch.float16):
        if any(_on_grid(step, off, narrow) for step, off in steps):
            return narrow
    return found


def _on_grid(values: Tensor, off: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values that can tell are within ``off`` of numbers of a dtype."""
    size = values.abs()
    spacing = torch.finfo(dtype).eps * size / 2
    telling = (off < spacing / 16) & (size >= torch.finfo(dtype).smallest_normal)
    apart = (values.to(dtype).double() - values).abs()
    return bool(telling.any()) and _nearly_all((apart <= off)[telling])


def _nearly_all(held: Tensor) -> bool:
    """Whether at most one in ten does not."""
    return 10 * int(held.sum()) >= 9 * len(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAndColumns:
    """The norms that the bound multiplies: of the hidden states [P] and of the head's rows [v].

    None where no product is bounded, or the bound was given.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    rows4: Tensor | None = None
    columns4: Tensor | None = None
