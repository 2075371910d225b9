"""What a diagnosis of teacher logits may ask for: small samples, and a confirmation of the whole.

Legend: n sampled positions, m sampled columns; a *unit* is a row of the batch or a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from opdtool.core.rebuild import Variant

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the comparison that failed (or passed)."""

    units: int
    routes: tuple[int, ...]
    heads: tuple[int, ...]
    vocabulary: int
    width: int
    draft: bool
    """Whether the columns are those of a draft map, not the whole vocabulary."""
    columns: int
    """Columns that were compared."""
    reference_columns: int
    tp_size: int
    cp_size: int
    packed: bool
    sharded_by_cp: bool
    uneven: bool
    normed: bool
    """Whether a norm was asked for."""
    beside: bool
    """Whether every head has a norm beside it."""
    mismatches: int
    equal: bool
    given: bool
    """Whether the tolerance was given, so that to agree within it says nothing of rounding."""
    coarser: bool
    """Whether the reference holds less precision than the logits are rebuilt in."""
    precision: str
    relative: float
    scale: float | None = None
    softcap: float | None = None
    """The factor and the cap that were asked for."""
    output_eps: float = 0.0
    """Of the dtype that the rebuilt logits are rounded to before their log-sum-exp is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spots:
    """Sampled positions of the reference: where each is stored, and what it is. int64 [n]."""

    cp_rank: Ints
    slot: Ints
    unit: Ints
    position: Ints

    def __len__(self) -> int:
        return len(self.slot)

    def take(self, some: Ints) -> Spots:
        """Some of them."""
        return Spots(
            cp_rank=self.cp_rank[some],
            slot=self.slot[some],
            unit=self.unit[some],
            position=self.position[some],
        )


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Elements of the reference that a variant does not make: how many, and where the first
    are, each spot with its column."""

    count: int
    spots: Spots
    columns: Ints


class Evidence(Protocol):
    """Sampled access to both sides of a comparison."""

    @property
    def facts(self) -> Facts:
        """What is known already."""

    def spots(self, wrong: int, any_: int) -> Spots:
        """Positions: up to ``wrong`` that mismatch, worst ones first, and ``any_`` of all."""

    def unit_spots(self, limit: int) -> Spots:
        """One position of each unit (of ``limit`` of them, evenly chosen)."""

    def spots_at(self, unit: Ints, position: Ints) -> Spots:
        """Given positions of units, those that were compared."""

    def wrong_columns(self) -> Ints:
        """Columns of the first mismatches."""

    def length(self, unit: int) -> int:
        """Real positions of a unit that are stored."""

    def recorded(self, spots: Spots, columns: Ints) -> Tensor:
        """The reference at spots and columns, float32 [n, m]."""

    def variant(self, spots: Spots, columns: Ints, variant: Variant) -> tuple[Tensor, Tensor]:
        """What a fault would have made at spots and columns, float32 [n, m], NaN where it is
        not judged; and how far the reference may be from it."""

    def tokens(self, unit: Ints, position: Ints, columns: Ints, variant: Variant) -> Tensor:
        """What a fault makes of tokens, wherever it then puts them: float32 [n, m]."""

    def whole(self, spots: Spots, variant: Variant) -> Tensor:
        """What a fault makes at spots of the whole vocabulary, of which a draft map takes some
        columns: float32 [n, V]."""

    def targets(self) -> Ints:
        """The column of the whole vocabulary that each compared column is."""

    def hidden(self, spots: Spots) -> Tensor:
        """The payload's hidden states at spots, float32 [n, H]."""

    def norm_weight(self, head: int) -> Tensor:
        """The weight that the norm beside a head multiplies by, float32 [H]."""

    def log_sum_exp(
        self, spots: Spots, variant: Variant, *, over_vocabulary: bool = False
    ) -> Tensor:
        """Of the logits that a fault makes, over the columns that are compared or over the whole
        vocabulary: float32 [n], NaN where it is not judged."""

    def only_padding(self) -> bool:
        """Whether the columns that only one side has are padding: of the reference, one value at
        every position; of the rebuilt logits, rows of zeros in every head."""

    def confirm(self, variant: Variant, bear: int) -> Unexplained:
        """What of the whole reference is not what the variant makes, where it is judged. The
        search may end once more than ``bear`` elements are found."""
