"""Comparing rebuilt logits with recorded ones, tile by tile: what differs, where, by how much.

Each element is held to the bound of :mod:`opdtool.core.bounds`.

Legend: P positions, v columns of one slice of the vocabulary; a rebuilt, ref recorded.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opdtool.core.bounds import BIG, TINY, ErrorBound, RowsAndColumns
from opdtool.core.divergence import SoftmaxSums

TILE = 1 << 19
"""Elements compared at a time: few enough to stay in a core's cache."""


@dataclass(order=True, frozen=True, slots=True)
class Place:
    """One element: a local slot, a column of the vocabulary, and both values."""

    slot: int
    column: int
    rebuilt: float
    reference: float


@dataclass(slots=True)
class Greatest:
    """The greatest of an error, and where."""

    value: float = -1.0
    place: Place | None = None

    def offer(self, other: Greatest) -> None:
        """Keep the greater of the two; the earlier place of equals."""
        if other.place is None:
            return
        later = self.place is not None and self.place <= other.place
        if other.value > self.value or (other.value == self.value and not later):
            self.value, self.place = other.value, other.place


class Comparison:
    """Statistics of |a - ref| over tiles, for ``slots`` positions of one rank.

    Tiles may come in any order and each element once. ``places`` are the first mismatches by
    slot and column. Per position: ``above``/``below`` the extremes of a - ref, ``rebuilt`` and
    ``recorded`` the running softmax sums (``recorded.lead`` gives KL(ref || a)), and the column
    of each one's greatest logit. ``worst`` is the greatest multiple of the bound per position.
    ``labels`` [slots] names the slots in places, where the order of comparing is another.

    ``output`` is a dtype that the rebuilt logits are written in: all statistics, and a tolerance
    that was given, are of what is written. A derived bound judges what is not rounded yet.
    Which of two neighbours a logit rounds to may hang on the order of a sum: what is recorded
    counts as rebuilt when a logit within ``order`` * |x| * |w| rounds to it.
    """

    def __init__(
        self,
        slots: int,
        bound: ErrorBound,
        *,
        overflow: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        places: int = 10,
        labels: Tensor | None = None,
        output: torch.dtype | None = None,
        order: float = 0.0,
    ) -> None:
        self.bound = bound
        self.output = output if output is not None and output.itemsize < 4 else None
        self.order = order
        self.overflow = overflow
        """What the recorded logits went through where that may overflow (float16)."""
        self.absolute, self.relative, self.multiple = Greatest(), Greatest(), Greatest()
        self.total = self.mismatches = 0
        self.first: list[Place] = []
        self.limit = places
        self.labels = labels
        self.above = torch.full((slots,), -torch.inf, device=device)
        self.below = torch.full((slots,), torch.inf, device=device)
        self.worst = torch.zeros(slots, device=device)
        self.rebuilt, self.recorded = SoftmaxSums(slots, device), SoftmaxSums(slots, device)
        self.top_rebuilt = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self.top_recorded = self.top_rebuilt.clone()
        self._scratch = _Scratch(device)

    def add(
        self,
        start: int,
        column: int,
        rebuilt: Tensor,
        reference: Tensor,
        norms: RowsAndColumns,
        *,
        vocabulary: bool = True,
    ) -> None:
        """Take in tiles [P, v] for slots from ``start`` on and columns from ``column`` on.

        ``rebuilt`` is float32, ``reference`` any floating dtype. ``vocabulary`` False says that
        the columns are padding: compared, but in no softmax.
        """
        P, v = rebuilt.shape
        if P == 0 or v == 0:
            return
        step = max(1, TILE // v)
        for low in range(0, P, step):
            part = slice(low, min(low + step, P))
            self._add(start + low, column, rebuilt[part], reference[part], norms, part, vocabulary)

    def _add(
        self,
        start: int,
        column: int,
        a: Tensor,
        reference: Tensor,
        norms: RowsAndColumns,
        part: slice,
        vocabulary: bool,
    ) -> None:
        at = slice(start, start + len(a))
        ref = self._scratch("ref", a).copy_(reference)
        whole, products = a, self._products(a, norms, part)
        if self.output is not None:
            a = self._written(a, ref, products, self.output, reference.dtype == self.output)
        error, measured = torch.sub(a, ref, out=self._scratch("error", a)), ref
        high, low = error.amax(dim=-1), error.amin(dim=-1)
        if not bool((high - low).isfinite().all()):
            if self.output is not None:
                rounded = torch.where(ref == a, a, whole.to(self.output))
                a = torch.where(a.isfinite(), a, rounded)
            error, measured = self._with_infinities(a, ref)
            high, low = error.amax(dim=-1), error.amin(dim=-1)
        self.total += a.numel()
        locate = _Locator(start, column, a, ref, self.labels)
        self._offer(self.absolute, error, high, low, locate)

        size = torch.abs(measured, out=self._scratch("size", a)).clamp_min_(TINY)
        ratio = torch.div(error, size, out=self._scratch("ratio", a))
        self._offer(self.relative, ratio, ratio.amax(dim=-1), ratio.amin(dim=-1), locate)

        self._judge(at, whole, ref, error, self._allowed(size, products, norms, part), locate)
        if vocabulary:
            self.above[at] = torch.maximum(self.above[at], high)
            self.below[at] = torch.minimum(self.below[at], low)
            self._distributions(at, column, a, ref, error)

    def _judge(
        self,
        at: slice,
        whole: Tensor,
        ref: Tensor,
        error: Tensor,
        allowed: Tensor,
        locate: _Locator,
    ) -> None:
        """Hold the errors to the bound: those of what is not rounded, where it was derived."""
        ratio = self._scratch("ratio", whole)
        own = self.output is not None and not self.bound.given
        # What lay in the first buffer of ``_written`` is not wanted any more.
        judged = torch.sub(whole, ref, out=self._scratch("most", whole)) if own else error
        torch.div(judged, allowed, out=ratio)
        most, least = ratio.amax(dim=-1), ratio.amin(dim=-1)
        if not bool((most - least).isfinite().all()):
            if own:
                judged = self._with_infinities(whole, ref)[0]
            # A bound that is no number allows nothing.
            bound = allowed.nan_to_num(nan=TINY, posinf=BIG).clamp_min_(TINY)
            torch.div(judged, bound, out=ratio)
            most, least = ratio.amax(dim=-1), ratio.amin(dim=-1)
        worst = self._offer(self.multiple, ratio, most, least, locate)
        self.worst[at] = torch.maximum(self.worst[at], worst)
        if bool((worst > 1).any()):
            self._mismatched(ratio, worst > 1, locate)

    def _products(self, a: Tensor, norms: RowsAndColumns, part: slice) -> Tensor | None:
        """|x| * |w| of every element, where it is asked for."""
        if norms.rows is None or norms.columns is None:
            return None
        if not self.bound.accumulation and (self.output is None or not self.order):
            return None
        return torch.mul(
            norms.rows[part, None], norms.columns[None], out=self._scratch("products", a)
        )

    def _allowed(
        self, size: Tensor, products: Tensor | None, norms: RowsAndColumns, part: slice
    ) -> Tensor:
        """The bound of every element, written over ``size``."""
        bound = self.bound
        size.mul_(bound.relative).add_(bound.absolute)
        if bound.accumulation and products is not None:
            size.add_(products, alpha=bound.accumulation)
        if bound.operand and norms.rows4 is not None and norms.columns4 is not None:
            size.addcmul_(norms.rows4[part, None] * bound.operand, norms.columns4[None])
        return size

    def _written(
        self, a: Tensor, ref: Tensor, products: Tensor | None, dtype: torch.dtype, held: bool
    ) -> Tensor:
        """The logits as they are written: of all that ``a`` may round to, the nearest to ref.

        ``held`` says that ``ref`` holds numbers of the dtype. Where something is not finite the
        caller looks again.
        """
        out, narrow = self._scratch("written", a), self._scratch("narrow", a, dtype)
        if products is None or self.order == 0:
            return out.copy_(narrow.copy_(a))
        most = torch.add(a, products, alpha=self.order, out=self._scratch("most", a))
        most.copy_(narrow.copy_(most))
        least = torch.sub(a, products, alpha=self.order, out=self._scratch("size", a))
        least.copy_(narrow.copy_(least))
        torch.clamp(ref, least, most, out=out)
        return out if held else out.copy_(narrow.copy_(out))

    def _with_infinities(self, a: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        """The error where something is not finite: 0 where both agree, else infinite."""
        as_stored = a if self.overflow is None else a.to(self.overflow).to(a.dtype)
        same = (a == ref) | (ref.isinf() & (as_stored == ref))
        error = torch.where(same, 0.0, a - ref)
        return error.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), (
            ref.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        )

    def _offer(
        self, kept: Greatest, values: Tensor, high: Tensor, low: Tensor, locate: _Locator
    ) -> Tensor:
        """Offer the greatest |value|; returns the greatest of each row [P]."""
        rows = torch.maximum(high, -low)
        greatest = float(rows.max())
        if greatest > kept.value:
            row = int(rows.argmax())
            kept.value, kept.place = greatest, locate(row, int(values[row].abs().argmax()))
        return rows

    def _mismatched(self, ratio: Tensor, rows: Tensor, locate: _Locator) -> None:
        wrong = ratio[rows].abs() > 1
        self.mismatches += int(wrong.sum())
        # Every row here has a mismatch: the first few by slot hold the first few of all.
        slots = [locate.slot(row) for row in rows.nonzero().flatten().tolist()]
        for at in sorted(range(len(slots)), key=slots.__getitem__)[: self.limit]:
            if len(self.first) >= self.limit and slots[at] > self.first[-1].slot:
                return
            row = int(rows.nonzero()[at])
            columns = wrong[at].nonzero().flatten()[: self.limit].tolist()
            found = [locate(row, column) for column in columns]
            self.first = heapq.nsmallest(self.limit, self.first + found)

    def _distributions(self, at: slice, column: int, a: Tensor, ref: Tensor, error: Tensor) -> None:
        for sums, logits, top in (
            (self.recorded, ref, self.top_recorded),
            (self.rebuilt, a, self.top_rebuilt),
        ):
            peak = logits.amax(dim=-1)
            rows = (peak > sums.peak[at]).nonzero().flatten()
            if len(rows):
                top[rows + at.start] = logits[rows].argmax(dim=-1) + column
            ahead = error.neg_() if logits is ref else None
            sums.add(at, logits, ahead=ahead, peak=peak, scratch=self._scratch.pair(a))

    def merge(self, other: Comparison) -> None:
        """Take in another part of the vocabulary for the same slots."""
        for name in ("absolute", "relative", "multiple"):
            getattr(self, name).offer(getattr(other, name))
        self.total += other.total
        self.mismatches += other.mismatches
        self.first = heapq.nsmallest(self.limit, self.first + other.first)
        self.above = torch.maximum(self.above, other.above)
        self.below = torch.minimum(self.below, other.below)
        self.worst = torch.maximum(self.worst, other.worst)
        for sums, top in (("rebuilt", "top_rebuilt"), ("recorded", "top_recorded")):
            mine, theirs = getattr(self, sums), getattr(other, sums)
            # The lower column of equals, whichever part comes first.
            better = (theirs.peak > mine.peak) | (
                (theirs.peak == mine.peak) & (getattr(other, top) < getattr(self, top))
            )
            setattr(self, top, torch.where(better, getattr(other, top), getattr(self, top)))
            mine.merge(theirs)

    def to_cpu(self) -> None:
        """Move to the CPU."""
        for name in ("above", "below", "worst", "top_rebuilt", "top_recorded"):
            setattr(self, name, getattr(self, name).cpu())
        self.rebuilt.to_cpu()
        self.recorded.to_cpu()
        self._scratch = _Scratch("cpu")

    @property
    def log_prob_errors(self) -> Tensor:
        """The greatest |log p(a) - log p(ref)| of each position, float32 [P]."""
        moved = self.rebuilt.log_sum_exp - self.recorded.log_sum_exp
        return torch.maximum((self.above - moved).abs(), (self.below - moved).abs())

    @property
    def divergences(self) -> Tensor:
        """KL(ref || a) of each position in nats, float32 [P]."""
        return self.recorded.divergence(self.rebuilt)

    @property
    def top1_agrees(self) -> Tensor:
        """Whether both have their greatest logit in one column, bool [P]."""
        return self.top_rebuilt == self.top_recorded


@dataclass(frozen=True, slots=True)
class _Locator:
    start: int
    column: int
    rebuilt: Tensor = field(repr=False)
    reference: Tensor = field(repr=False)
    labels: Tensor | None = None

    def slot(self, row: int) -> int:
        at = self.start + row
        return at if self.labels is None else int(self.labels[at])

    def __call__(self, row: int, column: int) -> Place:
        return Place(
            self.slot(row),
            self.column + column,
            float(self.rebuilt[row, column]),
            float(self.reference[row, column]),
        )


class _Scratch:
    """Buffers that are made once: fresh ones would cost more than what is computed in them."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._flat: dict[str, Tensor] = {}
        self._shaped: dict[tuple[str, torch.Size], Tensor] = {}

    def __call__(self, name: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        shaped = self._shaped.get((name, like.shape))
        if shaped is None:
            flat = self._flat.get(name)
            if flat is None or flat.numel() < like.numel():
                flat = torch.empty(like.numel(), dtype=dtype, device=self._device)
                self._flat[name] = flat
                for key in [key for key in self._shaped if key[0] == name]:
                    del self._shaped[key]
            shaped = self._shaped[name, like.shape] = flat[: like.numel()].view(like.shape)
        return shaped

    def pair(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return self("size", like), self("ratio", like)

    def __getstate__(self) -> dict[str, object]:
        return {"_device": self._device, "_flat": {}, "_shaped": {}}
