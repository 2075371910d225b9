"""What the ranks found, put together: one context-parallel rank's slots over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opdtool.core.compare import Comparison, Greatest, Place
from opdtool.core.offsets import Ints
from opdtool.findings import Scalar
from opdtool.jobs.reconstruct.plan import Floats, Plan
from opdtool.jobs.reconstruct.results import RankResult


@dataclass(frozen=True, slots=True)
class Located:
    """An element of all the logits: unit, position in it, column, ranks, both values."""

    unit: int
    position: int
    column: int
    tp_rank: int
    cp_rank: int
    rebuilt: float
    reference: float

    def place(self, plan: Plan) -> dict[str, Scalar]:
        """As a report shows it. The rebuilt logit is what is expected of the reference."""
        place: dict[str, Scalar] = {"sequence": self.unit, "position": self.position}
        if plan.draft is not None:
            place |= {"draft_column": self.column, "column": int(plan.draft[self.column])}
        else:
            place["column"] = self.column
        if plan.tp_size > 1:
            place["tp_rank"] = self.tp_rank
        if plan.cp_size > 1:
            place["cp_rank"] = self.cp_rank
        return place | {"expected": self.rebuilt, "actual": self.reference}


@dataclass(slots=True)
class Part:
    """The merged results of the tensor-parallel ranks that share their slots."""

    cp_rank: int
    result: RankResult


def merge_ranks(results: Iterable[RankResult]) -> list[Part]:
    """One part for each set of slots, in order of context-parallel rank.

    Results are used up: the first of each set becomes the merged one.
    """
    parts: dict[tuple[int, int], Part] = {}
    for result in results:
        key = (result.cp_rank, result.share)
        if key not in parts:
            parts[key] = Part(result.cp_rank, result)
        else:
            _merge(parts[key].result, result)
    return [parts[key] for key in sorted(parts)]


def _merge(into: RankResult, other: RankResult) -> None:
    assert np.array_equal(into.slots, other.slots)
    into.extent.merge(other.extent)
    if into.comparison is not None and other.comparison is not None:
        into.comparison.merge(other.comparison)
    if into.divergence is not None and other.divergence is not None:
        into.divergence.merge(other.divergence)
    if into.scores is not None and other.scores is not None:
        into.scores.merge(other.scores)


def locate(plan: Plan, part: Part, slot: int, column: int) -> tuple[int, int, int, int]:
    """(unit, position, tp rank, cp rank) of an element of a part."""
    at = int(np.flatnonzero(part.result.slots == slot)[0])
    tp_rank = next(
        (t for t in range(plan.tp_size) if column < plan.window(t).stop), plan.tp_size - 1
    )
    return (
        int(part.result.unit[at]),
        int(part.result.position[at]),
        tp_rank,
        part.cp_rank,
    )


def located(plan: Plan, part: Part, place: Place) -> Located:
    """Where a place of a part's comparison is."""
    unit, position, tp_rank, cp_rank = locate(plan, part, place.slot, place.column)
    return Located(unit, position, place.column, tp_rank, cp_rank, place.rebuilt, place.reference)


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison over all parts. Per-position values are [n], with their units."""

    total: int
    mismatches: int
    first: Sequence[Located]
    absolute: tuple[float, Located | None]
    relative: tuple[float, Located | None]
    multiple: tuple[float, Located | None]
    unit: Ints
    position: Ints
    log_prob_errors: Floats
    divergences: Floats
    agrees: Floats
    worst: Floats
    exact: bool
    """Whether no element differs at all."""


def compared(plan: Plan, parts: Sequence[Part], limit: int = 10) -> Compared | None:
    """The comparison over all parts, or None when nothing was compared."""
    found = [(part, part.result.comparison) for part in parts if part.result.comparison]
    if not found:
        return None
    comparisons: list[Comparison] = [comparison for _, comparison in found]
    first = [located(plan, part, place) for part, comparison in found for place in comparison.first]
    first.sort(key=lambda e: (e.unit, e.position, e.column))
    absolute = _greatest(plan, found, "absolute")

    def joined(values: Sequence[torch.Tensor]) -> Floats:
        together: Floats = torch.cat([v.cpu().to(torch.float64) for v in values]).numpy()
        return together

    return Compared(
        total=sum(c.total for c in comparisons),
        mismatches=sum(c.mismatches for c in comparisons),
        first=first[:limit],
        absolute=absolute,
        relative=_unbounded(_greatest(plan, found, "relative")),
        multiple=_greatest(plan, found, "multiple"),
        unit=np.concatenate([part.result.unit for part, _ in found]),
        position=np.concatenate([part.result.position for part, _ in found]),
        log_prob_errors=joined([c.log_prob_errors for c in comparisons]),
        divergences=joined([c.divergences for c in comparisons]),
        agrees=joined([c.top1_agrees for c in comparisons]),
        worst=joined([c.worst for c in comparisons]),
        exact=absolute[0] <= 0.0,
    )


def _unbounded(relative: tuple[float, Located | None]) -> tuple[float, Located | None]:
    """A relative error, which no factor covers where what is recorded is 0."""
    value, where = relative
    return (np.inf if value > 0 and where and where.reference == 0 else value), where


def _greatest(
    plan: Plan, found: Sequence[tuple[Part, Comparison]], name: str
) -> tuple[float, Located | None]:
    best, where = Greatest(), None
    for part, comparison in found:
        greatest: Greatest = getattr(comparison, name)
        if greatest.place is not None and greatest.value > best.value:
            best = greatest
            where = located(plan, part, greatest.place)
    return max(best.value, 0.0) + 0.0, where  # no -0
