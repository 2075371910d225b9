"""Searches for the number that goes with a fault: a shift, an order, a factor, a cap.

They propose what fits a few positions; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opdtool.checks.teacher_evidence import Evidence, Ints, Spots
from opdtool.core.rebuild import Variant

LEAST_OVERLAP = 8
"""Columns or positions that two shifted runs must share to be compared at all."""
CANDIDATES = 8
MOSTLY = 0.95
REACH = 2048
"""How far from a position it is looked for: a whole long sequence would not fit in memory."""
NEAR = 1e-3
"""How near a number must be to a rounder one to be tried as that."""


def column_shifts(evidence: Evidence, spots: Spots, columns: Ints) -> Iterator[int]:
    """Likely k, other than 0, for which column j of the reference is column j + k rebuilt.

    The normalised correlation of both rows at every distance, by Fourier transform.
    """
    size = len(columns)
    if size < 2 * LEAST_OVERLAP or len(spots) == 0:
        return
    made, _ = evidence.variant(spots, columns, Variant())
    recorded = evidence.recorded(spots, columns)
    made, recorded = made.double().nan_to_num(0.0, 0.0, 0.0), recorded.double()
    # What fell off at an edge may be anything: only what could have been made is looked at.
    low, high = made.amin(dim=-1, keepdim=True), made.amax(dim=-1, keepdim=True)
    margin = 0.05 * (high - low)
    possible = (recorded >= low - margin) & (recorded <= high + margin)
    middle = made.median(dim=-1, keepdim=True)[0]
    made, recorded = made - middle, torch.where(possible, recorded - middle, 0.0)
    length = 2 * size
    both = torch.fft.rfft(made, length) * torch.fft.rfft(recorded, length).conj()
    product = torch.fft.irfft(both, length).sum(dim=0)
    shifts = torch.cat([torch.arange(size), torch.arange(-size, 0)])
    made_energy = _running(made.square().sum(dim=0))
    recorded_energy = _running(recorded.square().sum(dim=0))
    # Columns j of the reference with 0 <= j + k < size are shared.
    low, high = (-shifts).clamp_min(0), size - shifts.clamp_min(0)
    shared = high - low
    made_shared = made_energy[(high + shifts).clamp(0, size)] - made_energy[low + shifts]
    recorded_shared = recorded_energy[high] - recorded_energy[low]
    energy = made_shared * recorded_shared
    score = product / energy.clamp_min(1e-30).sqrt()
    score[(shared < max(LEAST_OVERLAP, size // 64)) | (shifts == 0)] = -torch.inf
    likely = [at for at in score.topk(min(CANDIDATES, len(score)))[1].tolist() if score[at] > 0.9]
    # A ring of ranks is shifted both ways at once: the way that shares more columns is meant.
    yield from sorted((int(shifts[at]) for at in likely), key=lambda k: (abs(k), -k))


def _running(values: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=values.dtype), values.cumsum(0)])


def position_shifts(evidence: Evidence, columns: Ints) -> Iterator[int]:
    """Likely k, other than 0, for which position p of the reference is position p + k rebuilt.

    Three positions in the middle of units are looked for among all positions of their unit.
    """
    spots = evidence.unit_spots(64)
    facts = evidence.facts
    lengths = np.asarray([evidence.length(int(u)) for u in spots.unit])
    longest = spots.take(np.argsort(-lengths, kind="stable")[:2].astype(np.int64))
    wrong = evidence.spots(4, 0)
    votes: dict[int, int] = {}
    for probe in (longest, wrong):
        for k in range(len(probe)):
            one = probe.take(np.asarray([k], np.int64))
            unit, position = int(one.unit[0]), int(one.position[0])
            low, high = max(0, position - REACH), min(evidence.length(unit), position + REACH)
            every = np.arange(low, high, dtype=np.int64)
            routes = np.full(len(every), facts.routes[unit], np.int64)
            units = np.full(len(every), unit, np.int64)
            made, allowed = evidence.rebuilt(units, every, routes, columns)
            recorded = evidence.recorded(one, columns)
            agrees = (made - recorded).abs() <= allowed + facts.relative * recorded.abs()
            fits = mostly(agrees, dim=1)
            for at in every[fits.numpy()].tolist()[:64]:
                if at != position:
                    votes[at - position] = votes.get(at - position, 0) + 1
    lengths = np.asarray([evidence.length(unit) for unit in range(facts.units)])
    votes = {shift: count for shift, count in votes.items() if _overlaps(lengths, shift)}
    best = sorted(votes, key=lambda shift: (-votes[shift], abs(shift), -shift))[:CANDIDATES]
    # What went round an end is shifted both ways: the way that shares more positions is meant.
    yield from sorted(best, key=lambda shift: (abs(shift), -shift))


def _overlaps(lengths: Ints, shift: int) -> bool:
    """Whether more than half of all positions, and two of some unit, are still there when all
    are shifted: any order of a few positions is a shift of one of them."""
    shared = (lengths - abs(shift)).clip(0)
    return 2 * int(shared.sum()) > int(lengths.sum()) and int(shared.max(initial=0)) > 1


def cp_order(evidence: Evidence, columns: Ints) -> tuple[int, ...] | None:
    """Which rank's window each context-parallel rank holds, when it is another order."""
    facts = evidence.facts
    spots = evidence.spots(64, 192)
    order = []
    for rank in range(facts.cp_size):
        mine = spots.take(np.flatnonzero(spots.cp_rank == rank)[:8].astype(np.int64))
        if len(mine) == 0:
            return None
        recorded = evidence.recorded(mine, columns)
        held = None
        for other in (rank, *(q for q in range(facts.cp_size) if q != rank)):
            whole = [other] * facts.cp_size
            made, allowed = evidence.variant(mine, columns, Variant(cp_order=tuple(whole)))
            judged = ~made.isnan()
            agrees = (made - recorded).abs() <= allowed
            if bool(judged.any()) and bool(mostly(agrees[judged], dim=0)):
                held = other
                break
        if held is None:
            return None
        order.append(held)
    if order == list(range(facts.cp_size)) or len(set(order)) < facts.cp_size:
        return None
    return tuple(order)


def mostly(agrees: Tensor, dim: int) -> Tensor:
    """Whether all but a few elements agree: a stray one must not hide the fault beside it."""
    return agrees.float().mean(dim=dim) >= MOSTLY


def head_fits(evidence: Evidence, spots: Spots, columns: Ints) -> npt.NDArray[np.bool_]:
    """Whether each head reproduces the reference at each spot: bool [n, heads]."""
    facts = evidence.facts
    recorded = evidence.recorded(spots, columns)
    fits = np.zeros((len(spots), len(facts.heads)), np.bool_)
    for k, head in enumerate(facts.heads):
        routes = np.full(len(spots), head, np.int64)
        made, allowed = evidence.rebuilt(spots.unit, spots.position, routes, columns)
        agrees = (made - recorded).abs() <= allowed + facts.relative * recorded.abs()
        fits[:, k] = mostly(agrees | (made == recorded), dim=1).numpy()
    return fits


def best_factor(made: Tensor, recorded: Tensor) -> Iterator[float]:
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
    yield from _rounded(factor)


def best_cap(made: Tensor, recorded: Tensor) -> Iterator[float]:
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
    yield from _rounded((low + high) / 2)


def _rounded(value: float) -> Iterator[float]:
    """A number as somebody would have typed it, if it is near one, then as it was found."""
    near: list[float] = []
    for digits in (2, 3, 4):
        near.append(float(f"{value:.{digits}g}"))
        near.append(1 / float(f"{1 / value:.{digits}g}"))  # a temperature divides
    for short in dict.fromkeys(near):
        if abs(short / value - 1) < NEAR and short != 1:
            yield short
    yield value


def _finite(made: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    both = made.isfinite() & recorded.isfinite()
    return made[both].double(), recorded[both].double()
