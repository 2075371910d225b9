"""Which logits are rebuilt: the right ones, or those that a known fault would have made.

Legend: a *unit* is what is routed to one teacher: a row of the batch, or a segment of a pack. A
*slot* is one position of one context-parallel rank; *source* the token of the payload behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Ints, cp_window

Norm = Literal["asked", "none", "beside"]
Arrangement = Literal["zigzag", "contiguous", "pack-zigzag", "pack-contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How logits are made; the default is the right way, each field one departure from it."""

    routes: tuple[int, ...] | None = None
    """The head of every unit, instead of the one it names."""
    norm: Norm = "asked"
    """No norm although one is asked for, or the one that lies beside the head."""
    transposed: bool = False
    """x W instead of x W^T."""
    unscaled: bool = False
    """No scale although one is asked for."""
    uncapped: bool = False
    """No softcap although one is asked for."""
    factor: float = 1.0
    """Multiplies the logits, behind all that is asked for."""
    softcap: float | None = None
    """cap * tanh(logit / cap), behind the factor."""
    log_probs: bool = False
    """Logits less their log-sum-exp over the columns that are compared."""
    over_vocabulary: bool = False
    """That log-sum-exp over the whole vocabulary, of which a draft map takes some columns."""
    column_shift: int = 0
    """Column j holds the logit of column j + shift."""
    target_shift: int = 0
    """A draft column of target id t holds the logit of id t + shift."""
    position_shift: int = 0
    """Position p of a unit holds the logits of position p + shift."""
    arrangement: Arrangement = "zigzag"
    """How units are cut into context-parallel ranks."""
    cp_order: tuple[int, ...] | None = None
    """Rank r holds what rank cp_order[r] should."""
    columns: int | None = None
    """Judged are the columns before this one alone."""
    slack: float = 0.0
    """Added to the error bound: what the fault itself may round away."""
    eps: float = 0.0
    """Of the dtype that the logits were rounded to before the factor or the softcap."""

    def also(self, other: Variant) -> Variant:
        """This and all departures of ``other``."""
        departures = {
            field.name: getattr(other, field.name)
            for field in fields(other)
            if getattr(other, field.name) != field.default
        }
        return replace(self, **departures)

    @property
    def summed(self) -> Variant:
        """What makes the logits that a log-sum-exp is taken of: nothing that moves columns."""
        return replace(
            self,
            log_probs=False,
            over_vocabulary=False,
            column_shift=0,
            target_shift=0,
            columns=None,
            slack=0.0,
            eps=0.0,
        )


RIGHT = Variant()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrid:
    """Where the tokens of units lie in a stored tensor [B, width, ...].

    A batch keeps unit b in row b; a pack keeps all units in one row, from ``offsets`` on.
    """

    width: int
    offsets: Ints | None = None

    def flat(self, unit: Ints, position: Ints) -> Ints:
        """The flat index b * width + s of each token, -1 where the tensor ends before it."""
        if self.offsets is None:
            inside = (position >= 0) & (position < self.width)
            return np.where(inside, unit * self.width + position, -1)
        at = self.offsets[unit] + position
        inside = (position >= 0) & (at < np.minimum(self.offsets[unit + 1], self.width))
        return np.where(inside, at, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of one rank: int64 [n] each, n = S_local * rows (or T / CP)."""

    unit: Ints
    position: Ints
    """The position in the unit that the slot holds when units are cut rightly."""
    source_unit: Ints
    source: Ints
    """The flat index of the token behind the slot, -1 where there is none."""
    judged: npt.NDArray[np.bool_]
    """Whether the slot holds a real token."""


def slots_of(
    layout: PackedLayout,
    cp_rank: int,
    payload: TokenGrid,
    variant: Variant = RIGHT,
    lengths: Ints | None = None,
) -> Slots:
    """The slots of one rank of ``layout``, filled as the variant says.

    ``lengths`` are the real tokens of each unit: what lies behind them may be anything, and is
    judged by nobody, whatever a variant moves there or takes from there.
    """
    unit, position = _positions(layout, layout.global_slots(cp_rank).numpy())
    source_unit, at = _positions(layout, _held(layout, cp_rank, variant))
    at = at + variant.position_shift
    source = payload.flat(source_unit, at)
    judged = payload.flat(unit, position) >= 0
    if lengths is not None:
        judged &= position < lengths[unit]
    if variant != RIGHT:
        taken = judged if lengths is None else judged & (at < lengths[source_unit])
        source = np.where(taken, source, -1)
    return Slots(
        unit=unit, position=position, source_unit=source_unit, source=source, judged=judged
    )


def _held(layout: PackedLayout, cp_rank: int, variant: Variant) -> Ints:
    """The slots of the whole pack that a rank holds, dealt out as the variant says."""
    cp = layout.cp_size
    if variant.arrangement == "contiguous":
        local = layout.padded_lengths // cp
        return _ranges(layout.cu_seqlens_padded[:-1] + cp_rank * local, local)
    if variant.arrangement == "pack-contiguous":
        size = layout.total // cp
        return np.arange(cp_rank * size, (cp_rank + 1) * size, dtype=np.int64)
    if variant.arrangement == "pack-zigzag":
        windows = cp_window(layout.total, cp_rank, cp)
        return np.concatenate([np.arange(w.start, w.stop, dtype=np.int64) for w in windows])
    rank = cp_rank if variant.cp_order is None else variant.cp_order[cp_rank]
    held: Ints = layout.global_slots(rank).numpy()
    return held


def _positions(layout: PackedLayout, slots: Ints) -> tuple[Ints, Ints]:
    unit = np.searchsorted(layout.cu_seqlens_padded, slots, side="right") - 1
    return unit, slots - layout.cu_seqlens_padded[unit]


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """All of [start, start + length) one after another."""
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    shifts: Ints = np.repeat(starts - (ends - lengths), lengths)
    return within + shifts
