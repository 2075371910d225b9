"""A dumped tensor beside the one it should be, and what a known fault changes in the latter.

Axes of a mask beside those of :mod:`opdtool.checks.recipes`: which weight a token has, whether
the row's sample mask counts, and what is laid over the finished mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from opdtool.checks.recipes import (
    After,
    Bools,
    Cut,
    Ints,
    Placement,
    Recipe,
    Shift,
    Trace,
    placed,
    trace,
)
from opdtool.checks.recipes_values import Cells, Floats, Slots, Values
from opdtool.checks.room import Room
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout

Tokens = Literal["mask", "ones", "inverse"]
Overlay = Literal["none", "last-slot", "padding", "inverse", "tail"]
Axis = Literal["token", "sample", "placement", "shift", "overlay", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """A packed tensor by the route of its tokens; subclasses say what a token's value is."""

    route: Recipe


NO_ROWS = PackedLayout.from_cu_seqlens([0], [0])
"""A layout of nothing."""

FilledT = TypeVar("FilledT", bound=Filled)


@dataclass(slots=True, kw_only=True, eq=False)
class PackCase:
    """One pack's dumped tensor beside the one it should be.

    ``layout`` is the right one (None where no layout fits the dump's slots: then nothing is
    expected, and only faults with a layout of their own can explain it). ``rows`` and
    ``lengths`` are of the segments that hold batch rows; ``dump_lengths`` what the dump's own
    cu_seqlens says of them. ``whole`` marks a dump of the whole pack. ``sample`` are the dump
    slots on which faults are screened, sorted; ``mismatches`` counts all. ``surplus`` is how many
    slots more than there should be hold something other than zero, where that was counted.
    """

    slots: Slots
    rows: Ints
    lengths: Ints
    width: int
    layout: PackedLayout | None
    geometry: PackGeometry
    whole: bool
    dump_lengths: Ints | None = None
    neutral: tuple[float, ...] = (0.0,)
    mismatches: int = 0
    sample: Ints | None = None
    surplus: int | None = None

    @property
    def room(self) -> Room:
        """How much is held at a time."""
        return self.slots.room

    @property
    def right(self) -> Filled | None:
        """What the dump should be."""
        raise NotImplementedError

    @property
    def start(self) -> Filled:
        """What faults are made from: the right one, or where there is none any placement."""
        raise NotImplementedError

    def values(self, filled: Any, slots: Ints) -> Values:
        """What a filled pack holds at the given dump slots."""
        raise NotImplementedError

    def agrees(self, filled: Any, slots: Ints, actual: Values) -> Bools:
        """Whether it makes what the dump holds, slot by slot."""
        raise NotImplementedError

    def route(self, placement: Placement, shift: int) -> Recipe:
        """The right route but for where rows are placed."""
        kind: Literal["whole", "zigzag"] = "whole" if self.whole else "zigzag"
        return Recipe(placement=placement, shift=Shift(by=shift), cut=Cut(kind=kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A filling with a fault in it, and what was found about the fault (an order, a length)."""

    filled: Any
    note: str = ""


Build = Callable[[Any, Any], Built | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way of making a known fault: a change on one axis.

    ``build(case, filled so far)`` returns None where the fault cannot be made (a
    context-parallel fault in a dump of the whole pack). ``search`` marks builds that look at
    the dump, which costs more.
    """

    fault: str
    axis: Axis
    build: Build
    search: bool = False


def shifted(filled: FilledT, shift: Shift, after: After | None = None) -> FilledT:
    """The same with another shift."""
    route = replace(filled.route, shift=shift, after=after or filled.route.after)
    return replace(filled, route=route)


def placed_by(filled: FilledT, placement: Placement) -> FilledT:
    """The same with rows placed otherwise."""
    return replace(filled, route=replace(filled.route, placement=placement))


def cut_by(filled: FilledT, cut: Cut) -> FilledT:
    """The same with another cut."""
    return replace(filled, route=replace(filled.route, cut=cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskWeights:
    """The batch's masks: ``tokens`` [B,S], and ``sample`` float64 [B], ones without one.

    ``given`` is the sample mask as stored. ``rounding`` is the dtype of the product where
    that matters (one that does not hold all weights exactly), else None.
    """

    tokens: Cells
    sample: Floats
    given: torch.Tensor | None = None
    rounding: torch.dtype | None = None

    def rounded(self, values: Floats) -> Floats:
        """Values as their dtype holds them."""
        if self.rounding is None:
            return values
        exact = torch.from_numpy(values).to(self.rounding).to(torch.float64)
        return np.asarray(exact.numpy())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskRecipe(Filled):
    """A packed mask: where its weights come from and what is done to them.

    ``overlay`` replaces slots of the finished pack, before the ranks cut it: the last real
    slot of every kept row, all padding, or the last segment's positions ``tail`` by one; or
    takes every slot from one.
    """

    token: Tokens = "mask"
    sample: bool = True
    overlay: Overlay = "none"
    tail: tuple[int, int] = (0, 0)

    def values(self, weights: MaskWeights, slots: Ints) -> Floats:
        """What the mask holds at the given dump slots, float64."""
        at = trace(self.route, slots)
        out = np.zeros(len(slots), dtype=np.float64)
        real = np.flatnonzero(at.real)
        if self.token == "ones":
            out[real] = 1.0
        else:
            found = weights.tokens.at(at.row[real], at.column[real]).astype(np.float64)
            out[real] = 1.0 - found if self.token == "inverse" else found
        if self.sample:
            out[real] *= weights.sample[at.row[real]]
        return weights.rounded(self._overlaid(out, at, weights))

    def _overlaid(self, out: Floats, at: Trace, weights: MaskWeights) -> Floats:
        place = self.route.placement
        if self.overlay == "none":
            return out
        if self.overlay == "inverse":
            return np.where(at.alive, 1.0 - out, 0.0)
        row = place.row[at.segment]
        kept = (row >= 0) & (weights.sample[np.maximum(row, 0)] != 0)
        length = place.length[at.segment]
        if self.overlay == "last-slot":
            ones = kept & (at.position == length - 1)
        elif self.overlay == "padding":
            ones = (row < 0) | (at.position >= length)
        else:
            last = int(np.flatnonzero(place.row >= 0)[-1])
            inside = (at.position >= self.tail[0]) & (at.position < self.tail[1])
            ones = kept & (at.segment == last) & inside
        return np.where(ones & at.alive, 1.0, out)


@dataclass(slots=True, kw_only=True, eq=False)
class MaskCase(PackCase):
    """A dumped mask. Slot t should speak of token ``t + shift``."""

    weights: MaskWeights
    shift: int = 1
    atol: float = 0.0

    @property
    def right(self) -> MaskRecipe | None:
        """The expected mask."""
        return None if self.layout is None else self.recipe(placed(self.layout))

    @property
    def start(self) -> MaskRecipe:
        """The expected mask, or one without rows where no layout fits."""
        return self.right or self.recipe(placed(NO_ROWS))

    def recipe(self, placement: Placement) -> MaskRecipe:
        """The expected mask but for where rows are placed."""
        return MaskRecipe(route=self.route(placement, self.shift))

    def values(self, filled: MaskRecipe, slots: Ints) -> Values:
        """What a mask holds at the given dump slots, float64."""
        return filled.values(self.weights, slots)

    def agrees(self, filled: MaskRecipe, slots: Ints, actual: Values) -> Bools:
        """Whether the mask holds what the dump holds, slot by slot."""
        return close(self.values(filled, slots), actual, self.atol)


def close(expected: Values, actual: Values, atol: float) -> Bools:
    """Equal, or as near as ``atol``; NaN never is."""
    if atol == 0.0:
        return np.asarray(expected == actual)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(expected - actual) <= atol)
