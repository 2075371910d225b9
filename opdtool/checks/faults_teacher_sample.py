"""The sampled positions and columns that every proposal of a fault is screened on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from opdtool.checks.teacher_evidence import Evidence, Ints, Spots
from opdtool.core.rebuild import RIGHT, Variant

SAMPLE_WRONG, SAMPLE_ANY, SAMPLE_COLUMNS = 16, 16, 384
LIKELY = 0.99
"""The share of the mismatches that a likely fault explains."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fault, what it would have made, and the sentence that says so."""

    fault: str
    variant: Variant
    message: str
    leaves_out: bool = False
    """Whether the fault is that the mismatches lie in what is not judged."""

    @property
    def shifts(self) -> bool:
        """Whether something falls off an edge, to be judged by nobody."""
        moved = (self.variant.column_shift, self.variant.target_shift, self.variant.position_shift)
        return any(moved)


class View:
    """The sample beside what one fault would have made of it: other faults are looked for there.

    ``made`` and ``allowed`` [n, m] are of ``base``; NaN is what it does not judge.
    """

    def __init__(self, sample: Sample, base: Variant) -> None:
        self.sample, self.base = sample, base
        self.evidence, self.facts = sample.evidence, sample.facts
        self.spots, self.columns, self.every = sample.spots, sample.columns, sample.every
        self.recorded = sample.recorded
        self.made, self.allowed = self.evidence.variant(self.spots, self.columns, base)

    @property
    def routes(self) -> Ints:
        """The head that each spot goes through."""
        heads = self.facts.routes if self.base.routes is None else self.base.routes
        routes: Ints = np.asarray(heads, np.int64)[self.spots.unit]
        return routes

    def worst(self, count: int) -> Spots:
        """A few spots, mismatching ones first."""
        return self.spots.take(np.arange(min(count, len(self.spots)), dtype=np.int64))


class Sample:
    """The sample of both sides, and which of its elements mismatch."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.facts = evidence, evidence.facts
        self.spots = evidence.spots(SAMPLE_WRONG, SAMPLE_ANY)
        shared = min(self.facts.columns, self.facts.reference_columns)
        self.every: Ints = np.arange(shared, dtype=np.int64)
        self.columns = self.every
        if shared > SAMPLE_COLUMNS:
            drawn = np.random.default_rng(0).choice(shared, SAMPLE_COLUMNS, replace=False)
            edges = [0, 1, 2, shared - 3, shared - 2, shared - 1]
            wrong = evidence.wrong_columns()
            self.columns = np.unique(np.concatenate([drawn, edges, wrong])).astype(np.int64)
        self.recorded = evidence.recorded(self.spots, self.columns)
        self.right = View(self, RIGHT)
        self.wrong = ~agreeing(self.right.made, self.recorded, self.right.allowed)

    def screens(self, proposal: Proposal, *, whole: bool = False) -> bool:
        """Whether a fault explains the sample: all that it judges, and mismatches in it.

        A few mismatches may be left over, unless the ``whole`` must be explained.
        """
        made, allowed = self.evidence.variant(self.spots, self.columns, proposal.variant)
        judged = ~made.isnan()
        agrees = agreeing(made, self.recorded, allowed)
        telling = self.wrong & (~judged if proposal.leaves_out else judged)
        if int(telling.sum()) == 0:
            return False
        if bool((judged & ~self.wrong & ~agrees).any()):
            return False
        left = int((judged & self.wrong & ~agrees).sum())
        return left <= (0 if whole else 1 - LIKELY) * int((judged & self.wrong).sum())

    def explained(self, variant: Variant) -> int:
        """Sampled mismatches that a fault makes as they are recorded."""
        made, allowed = self.evidence.variant(self.spots, self.columns, variant)
        return int((self.wrong & agreeing(made, self.recorded, allowed)).sum())

    def left(self, variant: Variant) -> int:
        """Sampled elements that a fault judges and makes otherwise than they are recorded."""
        made, allowed = self.evidence.variant(self.spots, self.columns, variant)
        return int((~made.isnan() & ~agreeing(made, self.recorded, allowed)).sum())


def agreeing(made: Tensor, recorded: Tensor, allowed: Tensor) -> Tensor:
    """Whether elements are within what is allowed of each other, or the same infinity."""
    return ((made - recorded).abs() <= allowed) | (made == recorded)
