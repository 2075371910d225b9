"""What ``opdtool reconstruct`` was asked to do, checked and ready for any rank to do its part.

A plan holds places of tensors, not tensors: it travels to other processes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from opdtool.core.bounds import ErrorBound
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Ints
from opdtool.core.rebuild import TokenGrid

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAt:
    """A stored tensor: what to open, its name there, its shape and dtype."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class NormAt:
    """A final RMSNorm's weight [H], its epsilon, and what is added to the weight."""

    weight: TensorAt
    eps: float
    offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAt:
    """One teacher's head [V, H]; the norm to apply, and the one that lies beside it."""

    index: int
    weight: TensorAt
    norm: NormAt | None = None
    beside: NormAt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Logits in one file, or in one a (tensor-, context-parallel) rank.

    ``starts`` are the first columns of the shards and the end, [tp_size + 1]. ``gathered``
    says that the columns are the whole vocabulary's, to be cut to the draft columns.
    """

    what: str
    files: Mapping[tuple[int, int], TensorAt]
    tp_size: int
    cp_size: int
    starts: tuple[int, ...]
    gathered: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the first file; all have the same."""
        return next(iter(self.files.values())).dtype

    @property
    def width(self) -> int:
        """Columns over all shards."""
        return self.starts[-1]

    @property
    def uneven(self) -> bool:
        """Whether shards differ in width."""
        return len(set(np.diff(self.starts).tolist())) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Recorded log-probabilities, by slot of the whole layout [T] (units one after another).

    ``token`` int64 is the id that the slot's logits predict, -1 for none; ``recorded`` float64
    its recorded log-probability; ``dtype`` is the precision of those. ``left_out`` counts the
    tokens that are not scored, by reason.
    """

    token: Ints
    recorded: Floats
    dtype: torch.dtype
    left_out: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a rank needs to know.

    Columns: of the ``columns`` columns rebuilt the first ``real`` are logits, the rest padding.
    ``draft`` int64 [D] are the target ids of the draft columns, where there is a map.
    """

    kind: str
    payload: TensorAt
    grid: TokenGrid
    layout: PackedLayout
    packed: bool
    rows: int
    lengths: Ints
    """Real tokens of each unit."""
    tp_size: int
    cp_size: int
    heads: Mapping[int, HeadAt]
    routes: Ints
    vocabulary: int
    real: int
    columns: int
    draft: Ints | None
    compute: torch.dtype
    scale: float | None
    softcap: float | None
    budget: int
    bound: ErrorBound | None = None
    reference: Sharded | None = None
    student: Sharded | None = None
    weights: Floats | None = None
    """How much each slot of the whole layout counts, [T]: the rolled mask, or real tokens."""
    masked: bool = False
    """Whether the weights are a mask's."""
    scored: Scored | None = None
    score_bound: ErrorBound | None = None
    """How far the logits behind a log-probability may be off; or it itself, where given."""
    precision: torch.dtype | None = None
    """What the reference's values hold, where that is less than its dtype could."""

    payload_precision: torch.dtype | None = None
    """What the payload's values hold, likewise, where a norm may have rounded to it."""

    @property
    def own_windows(self) -> bool:
        """Whether the reference's shards are cut otherwise than evenly from these columns."""
        reference = self.reference
        if reference is None or reference.tp_size == 1 or reference.gathered:
            return False
        return reference.uneven or reference.width != self.columns

    @property
    def width(self) -> int:
        """H, or 0 for a payload of logits."""
        return self.payload.shape[-1] if self.kind == "hidden_states" else 0

    def window(self, tp_rank: int) -> slice:
        """The columns of one tensor-parallel rank."""
        if self.reference is not None and self.own_windows:
            return slice(self.reference.starts[tp_rank], self.reference.starts[tp_rank + 1])
        local = self.columns // self.tp_size
        # What does not divide is never written, but may be looked at: the last one takes the rest.
        last = tp_rank == self.tp_size - 1
        return slice(tp_rank * local, self.columns if last else (tp_rank + 1) * local)

    def shard_name(self, tp_rank: int, cp_rank: int) -> str:
        """The name of one rank's file."""
        parts = "".join(
            f".{axis}{rank}of{size}"
            for axis, rank, size in (
                ("tp", tp_rank, self.tp_size),
                ("cp", cp_rank, self.cp_size),
            )
            if size > 1
        )
        return f"teacher_logits{parts}.safetensors"
