"""Divergences of two distributions over a vocabulary that is never whole in memory.

Logits come in tiles [P, v]: some positions, a slice of the vocabulary. For every position a few
float32 sums are kept, relative to the running maximum, so that the result is that of the whole
vocabulary: exact over slices and over the shards of tensor-parallel ranks (contract 5.4).

Legend: P positions, v columns of one slice; p teacher's and q student's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.group import as_group, group_rank_size

VOCAB_SLICE = 8192
"""Columns taken at a time where nothing else decides."""
LOG2_E = 1.4426950408889634
TILE = 1 << 18
"""Elements taken at a time: few enough that all buffers stay in a core's cache."""


class SoftmaxSums:
    """Running sums of one softmax for each of P positions, and of functions weighted by it.

    Per position: ``peak`` the greatest logit so far, ``mass`` the sum of exp(logit - peak),
    ``drop`` the sum of exp(logit - peak) * (logit - peak), ``lead`` that of
    exp(logit - peak) * (logit - other) for another distribution's logits. All float32 [P].
    """

    __slots__ = ("drop", "lead", "mass", "peak")

    def __init__(self, positions: int, device: torch.device | str = "cpu") -> None:
        self.peak = torch.full((positions,), -torch.inf, device=device)
        self.mass = torch.zeros(positions, device=device)
        self.drop = torch.zeros(positions, device=device)
        self.lead = torch.zeros(positions, device=device)

    def add(
        self,
        at: slice,
        logits: Tensor,
        *,
        ahead: Tensor | None = None,
        entropy: bool = False,
        peak: Tensor | None = None,
        scratch: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Take in a tile of ``logits`` [P', v], float32, for the positions ``at``.

        ``ahead`` [P', v] is logits less the other distribution's; ``entropy`` asks for
        ``drop``; ``peak`` [P'] may give the tile's own row maxima, where they are known, and
        ``scratch`` two float32 buffers of the tile's shape to work in.
        """
        old = self.peak[at]
        new = torch.maximum(old, logits.amax(dim=-1) if peak is None else peak)
        self._lower(at, new)
        # Where every logit so far is -inf there is nothing to weigh: exp(-inf - 0) is 0.
        base = torch.where(new == -torch.inf, 0.0, new)[:, None]
        room, work = scratch or (torch.empty_like(logits), torch.empty_like(logits))
        # Powers of two have a kernel several times faster than that of exp.
        weights = torch.sub(logits, base, out=room).mul_(LOG2_E).exp2_()
        self.mass[at] += weights.sum(dim=-1)
        if ahead is not None:
            self.lead[at] += _weighted(weights, ahead, work)
        if entropy:
            drop = torch.sub(logits, base, out=work)
            self.drop[at] += _weighted(weights, drop, drop)

    def merge(self, other: SoftmaxSums) -> None:
        """Take in the sums of another part of the vocabulary for the same positions."""
        every = slice(None)
        new = torch.maximum(self.peak, other.peak)
        self._lower(every, new)
        other = other.copy()
        other._lower(every, new)
        self.mass += other.mass
        self.drop += other.drop
        self.lead += other.lead

    def copy(self) -> SoftmaxSums:
        """Sums that change on their own."""
        twin = SoftmaxSums(0)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name).clone())
        return twin

    def to_cpu(self) -> None:
        """Move to the CPU."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name).cpu())

    def tensor(self) -> Tensor:
        """The sums as one float32 [4, P], to send to another rank."""
        return torch.stack([self.peak, self.mass, self.drop, self.lead])

    @classmethod
    def of_tensor(cls, sums: Tensor) -> SoftmaxSums:
        """The sums that :meth:`tensor` packed."""
        made = cls(0)
        made.peak, made.mass, made.drop, made.lead = (row.clone() for row in sums)
        return made

    @property
    def log_sum_exp(self) -> Tensor:
        """log of the sum of exp(logit), float32 [P]; -inf where there is no finite logit."""
        return torch.where(self.mass > 0, self.peak + self.mass.log(), self.peak)

    @property
    def entropy(self) -> Tensor:
        """The entropy in nats, float32 [P]."""
        return (self.mass.log() - self.drop / self.mass).clamp_min(0.0)

    def divergence(self, other: SoftmaxSums) -> Tensor:
        """KL(this || other) in nats, float32 [P]; ``lead`` was taken against ``other``.

        A distribution that the other gives no weight to some of has infinite divergence.
        """
        # In float64, the peaks first: the terms are far larger than what they leave.
        lead, mass, theirs = self.lead.double(), self.mass.double(), other.mass.double()
        moved = torch.where(self.peak == other.peak, 0.0, other.peak.double() - self.peak.double())
        kl = lead / mass + (moved + (theirs / mass).log())
        return kl.clamp_min(0.0).float()

    def _lower(self, at: slice, new: Tensor) -> None:
        """Restate the sums relative to a higher peak ``new``."""
        old, mass = self.peak[at], self.mass[at]
        some = mass > 0
        fall = torch.where(some, old - new, 0.0)
        scale = fall.exp()
        self.drop[at] = (self.drop[at] + mass * fall) * scale
        # 0 * inf would be NaN where an infinite lead is scaled away; it stays infinite.
        lead = self.lead[at]
        self.lead[at] = torch.where(lead.isinf(), lead, lead * scale)
        self.mass[at] = mass * scale
        self.peak[at] = new


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergences:
    """What two distributions differ by, for each position, in nats (float32 [P])."""

    forward: Tensor
    """KL(teacher || student)."""
    reverse: Tensor
    """KL(student || teacher)."""
    teacher_entropy: Tensor
    student_entropy: Tensor


class DivergenceSums:
    """Running sums of teacher and student for P positions."""

    __slots__ = ("student", "teacher")

    def __init__(self, positions: int, device: torch.device | str = "cpu") -> None:
        self.teacher = SoftmaxSums(positions, device)
        self.student = SoftmaxSums(positions, device)

    def add(self, at: slice, teacher: Tensor, student: Tensor) -> None:
        """Take in tiles [P', v] of both, any floating dtype, for the positions ``at``.

        Raises:
            InputError: the tiles are not of one shape, or not of as many rows as ``at``.
        """
        rows, columns = teacher.shape
        start, stop, step = at.indices(len(self.teacher.peak))
        if student.shape != teacher.shape or step != 1 or stop - start != rows:
            raise InputError(
                f"tiles of shapes {list(teacher.shape)} and {list(student.shape)} are not those "
                f"of positions [{start}, {stop}) in steps of {step}"
            )
        tile = max(1, TILE // max(columns, 1))
        rooms = [torch.empty(min(tile, rows), columns, device=teacher.device) for _ in range(5)]
        for low in range(0, rows, tile):
            count = min(tile, rows - low)
            t, s, ahead, room, work = (room[:count] for room in rooms)
            some = slice(start + low, start + low + count)
            t.copy_(teacher[low : low + count])
            s.copy_(student[low : low + count])
            torch.sub(t, s, out=ahead)
            self.teacher.add(some, t, ahead=ahead, entropy=True, scratch=(room, work))
            self.student.add(some, s, ahead=ahead.neg_(), entropy=True, scratch=(room, work))

    def merge(self, other: DivergenceSums) -> None:
        """Take in another part of the vocabulary."""
        self.teacher.merge(other.teacher)
        self.student.merge(other.student)

    def to_cpu(self) -> None:
        """Move to the CPU."""
        self.teacher.to_cpu()
        self.student.to_cpu()

    def result(self) -> Divergences:
        """The divergences over all that was taken in."""
        return Divergences(
            forward=self.teacher.divergence(self.student),
            reverse=self.student.divergence(self.teacher),
            teacher_entropy=self.teacher.entropy,
            student_entropy=self.student.entropy,
        )


def chunked_divergences(
    teacher_logits: Tensor,
    student_logits: Tensor,
    *,
    vocab_slice: int = VOCAB_SLICE,
    vocab_parallel_group: object | None = None,
) -> Divergences:
    """Forward and reverse KL and both entropies of each position, without autograd.

    Both tensors are [..., V] or one rank's shard [..., V_local] of the vocabulary, then with the
    group of its ranks: the sums are exchanged, four floats a position and distribution, and every
    rank has the result for the whole vocabulary. Float32 throughout, ``vocab_slice`` columns at a
    time. Each result has the shape [...].

    Raises:
        InputError: the shapes differ or have no columns, ``vocab_slice`` is below 1, or this
            process is no member of the group.
    """
    if vocab_slice < 1:
        raise InputError(f"vocab_slice is {vocab_slice}; it must be at least 1 column")
    if teacher_logits.shape != student_logits.shape:
        raise InputError(
            f"teacher_logits has shape {list(teacher_logits.shape)} and student_logits "
            f"{list(student_logits.shape)}; divergences need the same positions and columns"
        )
    if teacher_logits.dim() == 0 or teacher_logits.shape[-1] == 0:
        raise InputError(
            f"the logits have shape {list(teacher_logits.shape)}; expected [..., V] with columns"
        )
    lead = teacher_logits.shape[:-1]
    with torch.no_grad():
        teacher = teacher_logits.reshape(-1, teacher_logits.shape[-1])
        student = student_logits.reshape(-1, student_logits.shape[-1])
        sums = DivergenceSums(len(teacher), teacher.device)
        for start in range(0, teacher.shape[1], vocab_slice):
            columns = slice(start, start + vocab_slice)
            sums.add(slice(None), teacher[:, columns], student[:, columns])
        sums = _exchanged(sums, vocab_parallel_group)
        found = sums.result()
    return Divergences(
        forward=found.forward.reshape(lead),
        reverse=found.reverse.reshape(lead),
        teacher_entropy=found.teacher_entropy.reshape(lead),
        student_entropy=found.student_entropy.reshape(lead),
    )


def _exchanged(sums: DivergenceSums, group: object | None) -> DivergenceSums:
    _, size = group_rank_size(group, "vocab_parallel_group")
    if size == 1:
        return sums
    mine = torch.stack([sums.teacher.tensor(), sums.student.tensor()])
    merged, *others = (_sums_of(part) for part in as_group(group).all_gather(mine))
    for other in others:
        merged.merge(other)
    return merged


def _sums_of(part: Tensor) -> DivergenceSums:
    """The sums that one rank sent."""
    sums = DivergenceSums(0)
    sums.teacher, sums.student = (SoftmaxSums.of_tensor(each) for each in part)
    return sums


def _weighted(weights: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """The row sums of weights * values, written over ``out``, which may be ``values``.

    A weight of zero cancels minus infinity, and what is no number. It cancels no infinity: that
    one is ahead of a distribution which gives no weight, and a weight that is too small for
    float32 in this slice of the vocabulary is none the less one.
    """
    products = torch.mul(weights, values, out=out)
    sums = products.sum(dim=-1)
    if not bool(sums.isfinite().all()):
        sums = products.masked_fill_(weights == 0, 0.0).sum(dim=-1)
        if out is not values:
            sums = torch.where((values == torch.inf).any(dim=-1), torch.inf, sums)
    return sums
