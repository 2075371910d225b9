"""What one rank finds: plain sums and places that travel between processes and merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opdtool.core.compare import Comparison
from opdtool.core.divergence import DivergenceSums, SoftmaxSums
from opdtool.core.offsets import Ints
from opdtool.core.scores import TokenScores


@dataclass(slots=True)
class Extent:
    """The range of the finite logits, how many are not finite, and the first places of those."""

    low: float = float("inf")
    high: float = float("-inf")
    not_finite: int = 0
    first: list[tuple[int, int, float]] = field(default_factory=list)
    """(slot, column, value)."""

    def merge(self, other: Extent) -> None:
        """Take in another part."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.not_finite += other.not_finite
        self.first = (self.first + other.first)[:10]


@dataclass(slots=True)
class RankResult:
    """What one rank found. Per-position values are in the order of ``slots`` (local slots)."""

    tp_rank: int
    cp_rank: int
    slots: Ints
    unit: Ints
    position: Ints
    extent: Extent
    comparison: Comparison | None = None
    divergence: DivergenceSums | None = None
    softmax: SoftmaxSums | None = None
    scores: TokenScores | None = None
    share: int = 0
    """Which of the data-parallel replicas' shares of the tiles this is."""
    bytes_written: int = 0
    """Into the rank's file, which the replicas fill together."""
    written: Sequence[Mapping[str, object]] = ()

    def to_cpu(self) -> RankResult:
        """The same, fit to travel to another process."""
        for sums in (self.comparison, self.divergence, self.scores):
            if sums is not None:
                sums.to_cpu()
        return self
