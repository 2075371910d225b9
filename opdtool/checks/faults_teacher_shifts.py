"""Searches for shifts of the vocabulary and of the sequence, and for what else moves whole rows.

Rows are likened by the correlation of their ranks: that stays near one whatever monotone thing
was done to the logits besides, and however huge, constant or infinite what fell off an edge is.
They propose what fits a few positions; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opdtool.checks.faults_teacher_sample import View
from opdtool.checks.teacher_evidence import Ints
from opdtool.core.rebuild import Variant

LEAST_OVERLAP = 8
"""Columns that two shifted rows must share to be compared at all."""
LEAST_POSITIONS = 4
"""Positions of a unit that must be left, where fewer than half are: any order of a few
positions is a shift of one of them."""
CANDIDATES, ROUGH = 8, 64
"""Numbers that are proposed, and that are looked at more closely before."""
ROUGHLY = 0.5
"""The least correlation of whole rows that share a part, whatever the rest of them is."""
ENOUGH_COLUMNS = 4096
ALIKE = 0.8
"""The least correlation of rows that are the same but for what fell off."""
SAME = 0.99
"""The least correlation of rows that are taken to be of one position."""
CONFIDENCE = 6.0
"""By how many deviations a correlation must be above what unlike rows have."""
REACH = 2048
"""How far from a position it is looked for: a whole long sequence would not fit in memory."""
PROBES = 8
FULL_ROWS, FULL_ELEMENTS = 3, 1 << 16
"""Positions that are looked at over the whole vocabulary; more of a small one."""


def column_shifts(view: View, *, before_cut: bool = False) -> Iterator[int]:
    """Likely k, other than 0, for which column j of the reference is column j + k rebuilt.

    ``before_cut`` shifts the whole vocabulary, of which a draft map then takes some columns.
    """
    evidence, facts = view.evidence, view.facts
    size = facts.vocabulary if before_cut else len(view.every)
    if size < 2 * LEAST_OVERLAP:
        return
    count = max(FULL_ROWS, min(len(view.spots), FULL_ELEMENTS // size))
    spots = view.worst(count)
    at = evidence.targets() if before_cut else view.every
    recorded = torch.full((len(spots), size), torch.nan)
    recorded[:, torch.from_numpy(at)] = evidence.recorded(spots, view.every)
    if before_cut:
        made = evidence.whole(spots, view.base)
    else:
        made, _ = evidence.variant(spots, view.every, view.base)
    least = max(LEAST_OVERLAP, len(at) // 64)
    likely = []
    for shift in _roughly_alike(made, recorded, least):
        alike, elements = _overlapping(made, recorded, shift)
        confidence = np.arctanh(min(alike, 0.999999)) * max(elements - 3, 0) ** 0.5
        if alike > ALIKE and confidence > CONFIDENCE:
            likely.append((confidence, shift))
    best = [shift for _, shift in sorted(likely, reverse=True)[:CANDIDATES]]
    # A ring of ranks is shifted both ways at once: the way that shares more columns is meant.
    yield from sorted(best, key=lambda k: (abs(k), -k))


def _roughly_alike(made: Tensor, recorded: Tensor, least: int) -> list[int]:
    """Shifts by which rows are most like each other, by the ranks that they have in all."""
    shifts, score, shared, columns = _correlations(made, recorded)
    confidence = score.clamp(-0.999999, 0.999999).atanh() * (shared - 3).clamp_min(0).sqrt()
    possible = (columns >= least) & (score > ROUGHLY) & (shifts != 0)
    confidence[~possible] = -torch.inf
    best = confidence.topk(min(ROUGH, len(confidence)))[1]
    return [int(shifts[at]) for at in best.tolist() if possible[at]]


def _overlapping(made: Tensor, recorded: Tensor, shift: int) -> tuple[float, int]:
    """How alike two rows are in what a shift lets them share, ranked there alone; and of how
    many elements that is said. What fell off has no part in it."""
    low, high = max(0, -shift), made.shape[1] - max(0, shift)
    at = (recorded[:, low:high].isfinite().any(dim=0)).nonzero().flatten() + low
    at = at[torch.from_numpy(np.asarray(_spread(len(at), ENOUGH_COLUMNS), np.int64))]
    a, b = made[:, at + shift], recorded[:, at]
    alike = likeness(a, b)
    told = ~alike.isnan()
    elements = int((a.isfinite() & b.isfinite())[told].sum())
    return (float(alike[told].mean()) if bool(told.any()) else 0.0), elements


def _correlations(made: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(shift k, correlation of recorded column j with made column j + k, elements shared, columns
    shared) for every k, by Fourier transforms; rows are [n, V], NaN where there is nothing."""
    size = made.shape[1]
    length = 2 * size
    total = torch.zeros(4, length, dtype=torch.float64)  # covariance, both variances, elements
    columns = torch.zeros(length, dtype=torch.float64)
    for a, b in zip(made, recorded, strict=True):
        x, there_x = ranks(a[None])
        y, there_y = ranks(b[None])
        forward = torch.fft.rfft(torch.cat([there_x.double(), x, x.square()]), length)
        back = torch.fft.rfft(torch.cat([there_y.double(), y, y.square()]), length).conj()

        def lagged(i: int, j: int, f: Tensor = forward, g: Tensor = back) -> Tensor:
            out: Tensor = torch.fft.irfft(f[i] * g[j], length)
            return out

        count = lagged(0, 0).round()
        sum_x, sum_y, some = lagged(1, 0), lagged(0, 1), count.clamp_min(1)
        total[0] += lagged(1, 1) - sum_x * sum_y / some
        total[1] += lagged(2, 0) - sum_x.square() / some
        total[2] += lagged(0, 2) - sum_y.square() / some
        total[3] += count
        columns = torch.maximum(columns, count)
    covariance, first, second, shared = total
    # Sums of up to one each: less than this is what the transforms round.
    flat = torch.minimum(first, second) < 1e-9 * shared.clamp_min(1)
    score = covariance / torch.where(flat, 1.0, (first * second).clamp_min(1e-30)).sqrt()
    score[flat] = 0.0
    shifts = torch.cat([torch.arange(size), torch.arange(-size, 0)])
    return shifts, score, shared, columns


def ranks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The ranks of each row's elements, from -1 to 1, those of equals the same, 0 where there is
    no number; and where there is one. float64 [n, m] and bool [n, m]."""
    there = rows.isfinite()
    values = torch.where(there, rows.double(), torch.inf).contiguous()
    ordered = values.sort(dim=-1)[0].contiguous()
    low = torch.searchsorted(ordered, values)
    high = torch.searchsorted(ordered, values, right=True)
    count = there.sum(dim=-1, keepdim=True).clamp_min(1)
    middle = (low + high).double() / count - 1
    return torch.where(there, middle, 0.0), there


def likeness(made: Tensor, recorded: Tensor) -> Tensor:
    """The rank correlation of each row of ``made`` [n, m] with that of ``recorded`` [n, m] or
    [1, m], over the elements that both have: float64 [n]; NaN where they tell nothing."""
    both = made.isfinite() & recorded.isfinite()
    x, _ = ranks(torch.where(both, made, torch.nan))
    y, _ = ranks(torch.where(both, recorded, torch.nan))
    count = both.sum(dim=-1)
    some = count.clamp_min(1).double()
    x = torch.where(both, x - (x.sum(dim=-1) / some)[:, None], 0.0)
    y = torch.where(both, y - (y.sum(dim=-1) / some)[:, None], 0.0)
    energy = (x.square().sum(dim=-1) * y.square().sum(dim=-1)).sqrt()
    told = (count >= LEAST_OVERLAP) & (energy > 1e-9 * some)
    return torch.where(told, (x * y).sum(dim=-1) / energy.clamp_min(1e-30), torch.nan)


def position_shifts(view: View) -> Iterator[int]:
    """Likely k, other than 0, for which position p of the reference is position p + k rebuilt.

    A few positions are looked for among all near positions of their unit.
    """
    evidence, facts = view.evidence, view.facts
    votes: dict[int, int] = {}
    near: dict[tuple[int, int, int], Tensor] = {}
    for k in _spread(len(view.spots), PROBES):
        unit, position = int(view.spots.unit[k]), int(view.spots.position[k])
        low, high = max(0, position - REACH), min(evidence.length(unit), position + REACH)
        every = np.arange(low, high, dtype=np.int64)
        if (unit, low, high) not in near:
            units = np.full(len(every), unit, np.int64)
            # One stretch at a time: that of a long sequence is large.
            near = {(unit, low, high): evidence.tokens(units, every, view.columns, view.base)}
        made = near[unit, low, high]
        alike = likeness(made, view.recorded[k : k + 1].expand_as(made)).nan_to_num(0.0).numpy()
        fits = np.flatnonzero(alike > max(ALIKE, float(alike.max(initial=0)) - 0.02))
        for at in every[fits[np.argsort(-alike[fits], kind="stable")]].tolist()[:64]:
            if at != position:
                votes[at - position] = votes.get(at - position, 0) + 1
    lengths = np.asarray([evidence.length(unit) for unit in range(facts.units)])
    best = sorted(votes, key=lambda shift: (-votes[shift], abs(shift), -shift))
    best = [shift for shift in best if _is_shift(view, lengths, shift)][:CANDIDATES]
    # What went round an end is shifted both ways: the way that shares more positions is meant.
    yield from sorted(best, key=lambda shift: (abs(shift), -shift))


def _is_shift(view: View, lengths: Ints, shift: int) -> bool:
    """Whether more than half of all positions are still there when all are shifted; or half, or
    several of one unit, and what fell off is not other positions of it in some order."""
    shared = (lengths - abs(shift)).clip(0)
    total, left = int(lengths.sum()), int(shared.sum())
    if 2 * left > total and shared.max() > 1:
        return True
    if shared.max(initial=0) < LEAST_POSITIONS and (left == 0 or 2 * left < total):
        return False
    return not _reordered(view, lengths, shift)


def _reordered(view: View, lengths: Ints, shift: int) -> bool:
    """Whether what fell off the longest unit holds other positions than those that went round."""
    unit = int(lengths.argmax())
    size = int(lengths[unit])
    low, high = (size - shift, size) if shift > 0 else (0, -shift)
    fell = np.asarray(_spread(high - low, PROBES), np.int64) + low
    every = np.arange(min(size, REACH), dtype=np.int64)
    spots = view.evidence.spots_at(np.full(len(fell), unit, np.int64), fell)
    recorded = view.evidence.recorded(spots, view.columns)
    units = np.full(len(every), unit, np.int64)
    made = view.evidence.tokens(units, every, view.columns, view.base)
    for k, position in enumerate(spots.position.tolist()):
        alike = likeness(made, recorded[k : k + 1].expand_as(made)).nan_to_num(0.0)
        alike[(position + shift) % size : (position + shift) % size + 1] = 0.0
        if float(alike.max()) > SAME:
            return True
    return False


def _spread(size: int, count: int) -> list[int]:
    """At most ``count`` of range(size), the first ones among them."""
    if size <= count:
        return list(range(size))
    return sorted({int(at) for at in np.linspace(0, size - 1, count)})


def cp_orders(view: View) -> Iterator[tuple[int, ...]]:
    """Which rank's window each context-parallel rank may hold, when it is another order."""
    size = view.facts.cp_size
    spots = view.evidence.spots(64, 192)
    order = []
    for rank in range(size):
        mine = spots.take(np.flatnonzero(spots.cp_rank == rank)[:8].astype(np.int64))
        if len(mine) == 0:
            return
        recorded = view.evidence.recorded(mine, view.columns)
        scores = []
        for other in range(size):
            held = view.base.also(Variant(cp_order=(other,) * size))
            made, _ = view.evidence.variant(mine, view.columns, held)
            scores.append(float(likeness(made, recorded).nanmedian().nan_to_num(0.0)))
        best = max(range(size), key=lambda other: scores[other] + 1e-3 * (other == rank))
        if scores[best] < ALIKE:
            return
        order.append(best)
    if order != list(range(size)) and len(set(order)) == size:
        yield tuple(order)


def heads_alike(view: View, limit: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Units [n], and which head's logits theirs are most like: bool [n, heads]."""
    facts, evidence = view.facts, view.evidence
    spots = evidence.unit_spots(limit)
    recorded = evidence.recorded(spots, view.columns)
    alike = np.zeros((len(spots), len(facts.heads)))
    for k, head in enumerate(facts.heads):
        through = view.base.also(Variant(routes=(head,) * facts.units))
        made, _ = evidence.variant(spots, view.columns, through)
        alike[:, k] = likeness(made, recorded).nan_to_num(0.0).numpy()
    best = alike.max(axis=1, keepdims=True)
    return spots.unit, (alike > ALIKE) & (alike == best)
