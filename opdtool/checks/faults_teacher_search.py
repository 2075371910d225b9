"""Searches for the number that goes with a fault, a factor or a cap, and for heads that fit.

They propose what fits a few positions; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opdtool.checks.faults_teacher_sample import View, agreeing
from opdtool.checks.teacher_evidence import Ints
from opdtool.core.bounds import precision_behind
from opdtool.core.rebuild import Variant

MOSTLY = 0.95
NEAR = 1e-3
"""How near a number must be to a rounder one to be tried as that."""


def mostly(agrees: Tensor, dim: int) -> Tensor:
    """Whether all but a few elements agree: a stray one must not hide the fault beside it."""
    return agrees.float().mean(dim=dim) >= MOSTLY


def heads_fitting(view: View, limit: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Units [n], and whether each head reproduces the reference there: bool [n, heads]."""
    facts, evidence = view.facts, view.evidence
    spots = evidence.unit_spots(limit)
    recorded = evidence.recorded(spots, view.columns)
    fits = np.zeros((len(spots), len(facts.heads)), np.bool_)
    for k, head in enumerate(facts.heads):
        through = view.base.also(Variant(routes=(head,) * facts.units))
        made, allowed = evidence.variant(spots, view.columns, through)
        # A position that lost its logits to a shift says nothing against a head.
        agrees = agreeing(made, recorded, allowed) | made.isnan()
        fits[:, k] = mostly(agrees, dim=1).numpy()
    return spots.unit, fits


def slope(made: Tensor, recorded: Tensor, relative: float = 0.0) -> Iterator[float]:
    """The factor c for which recorded is c * made plus something of each row; rounded first."""
    both = made.isfinite() & recorded.isfinite()
    count = both.sum(dim=-1, keepdim=True).clamp_min(1)

    def centred(values: Tensor) -> Tensor:
        kept = torch.where(both, values.double(), 0.0)
        return torch.where(both, kept - kept.sum(dim=-1, keepdim=True) / count, 0.0)

    a, r = centred(made), centred(recorded)
    energy = float(a.square().sum())
    if energy > 0:
        factor = float((a * r).sum()) / energy
        if factor != 0 and np.isfinite(factor) and abs(factor - 1) > 1e-6:
            yield from _rounded(factor, relative)


def coarser(view: View, *, factor: float | None = None, cap: float | None = None) -> float:
    """The epsilon of the dtype that logits were rounded to before a factor or a cap, where that
    is coarser than what is recorded; else 0."""
    if view.facts.relative <= 0:
        return 0.0
    found = precision_behind(view.recorded.flatten(), scale=factor, softcap=cap)
    eps = float(torch.finfo(found).eps)
    return eps if eps > view.facts.relative else 0.0


def best_factor(made: Tensor, recorded: Tensor, relative: float = 0.0) -> Iterator[float]:
    """The factor c, other than 1, for which c * made is nearest to recorded; rounded first."""
    a, r = _finite(made, recorded)
    large = a.abs() >= a.abs().median() if len(a) else a > 0
    if not bool((a[large] != 0).any()):
        return
    # Stray elements move the median little; then the rest says it to more digits.
    middle = float((r[large] / a[large]).median())
    near = large & ((r - middle * a).abs() <= 0.02 * abs(middle) * a.abs())
    energy = float(a[near].square().sum())
    if energy == 0:
        return
    factor = float((a[near] * r[near]).sum()) / energy
    if factor == 0 or not np.isfinite(factor) or abs(factor - 1) < 1e-6:
        return
    yield from _rounded(factor, relative)


def best_cap(made: Tensor, recorded: Tensor, relative: float = 0.0) -> Iterator[float]:
    """The cap for which cap * tanh(made / cap) is nearest to recorded; rounded first."""
    a, r = _finite(made, recorded)
    if len(a) == 0 or float(r.abs().max()) == 0:
        return
    a, r = a.abs(), r.abs()
    # Large logits tell most of the cap.
    weight = a.square()
    target = float((weight * r).sum())
    low, high = float(r.max()), float(a.max()) * 1e4
    if low >= high or float((weight * a).sum()) <= target:
        return

    def excess(cap: float) -> float:
        return float((weight * (a / cap).tanh() * cap).sum()) - target

    if excess(low) > 0:
        low /= 2
    for _ in range(200):
        middle = (low + high) / 2
        if excess(middle) > 0:
            high = middle
        else:
            low = middle
    yield from _rounded((low + high) / 2, relative)


def _rounded(value: float, relative: float) -> Iterator[float]:
    """A number as somebody would have typed it, if it is near one, then as it was found.

    What is recorded to ``relative`` says the number no better.
    """
    near: list[float] = []
    for digits in (2, 3, 4):
        near.append(float(f"{value:.{digits}g}"))
        near.append(1 / float(f"{1 / value:.{digits}g}"))  # a temperature divides
    for short in dict.fromkeys(near):
        if abs(short / value - 1) < max(NEAR, relative) and short != 1:
            yield short
    yield value


def _finite(made: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    both = made.isfinite() & recorded.isfinite()
    return made[both].double(), recorded[both].double()
