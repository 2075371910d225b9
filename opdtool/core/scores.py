"""Log-probabilities of single tokens, out of logits that are never whole in memory.

Beside each log-probability stands how far a recorded one may be from it, when every logit may be
off by the bound of :mod:`opdtool.core.bounds`: an error of the token's own logit counts as far
as the token is unlikely, the errors of the others as far as they are likely. docs/tolerance.md
derives it.

Legend: P positions, v columns of one slice of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opdtool.core.bounds import BIG, EPS, ErrorBound, RowsAndColumns
from opdtool.core.divergence import TILE, SoftmaxSums


class TokenScores:
    """The log-probability of one token at each of P positions, and what it may be off by.

    ``tokens`` int64 [P] are the columns that are scored, -1 for none. A bound that was given is
    of the log-probabilities themselves: then nothing is kept of the logits'.
    """

    __slots__ = ("_bound", "logits", "off", "softmax", "tokens")

    def __init__(self, tokens: Tensor, bound: ErrorBound, device: torch.device | str) -> None:
        count = len(tokens)
        self.tokens = tokens.to(device)
        self.softmax = SoftmaxSums(count, device)
        """Its ``lead`` is the sum of exp(logit) * (exp(off) - 1) over the other columns."""
        self.logits = torch.full((count,), torch.nan, device=device)
        self.off = torch.zeros(count, device=device)
        """What the token's own logit may be off by."""
        self._bound = None if bound.given else bound

    def add(self, start: int, column: int, logits: Tensor, norms: RowsAndColumns) -> None:
        """Take in a tile [P', v], any floating dtype, from position and column on."""
        rows, width = logits.shape
        step = max(1, TILE // max(width, 1))
        rooms = [torch.empty(min(step, rows), width, device=logits.device) for _ in range(4)]
        for low in range(0, rows, step):
            part = slice(low, min(low + step, rows))
            some = slice(start + part.start, start + part.stop)
            wide, off, room, work = (one[: part.stop - part.start] for one in rooms)
            wide.copy_(logits[part])
            at, picked = self._own(some, column, width)
            self.logits[at] = wide[at - some.start, picked]
            if self._bound is None:
                self.softmax.add(some, wide, scratch=(room, work))
                continue
            _allowed(self._bound, wide, norms, part, off)
            self.off[at] = off[at - some.start, picked]
            off[at - some.start, picked] = 0.0
            # A logit of -inf has an infinite bound and no weight: it counts for nothing.
            self.softmax.add(some, wide, ahead=off.expm1_().clamp_max_(BIG), scratch=(room, work))

    def _own(self, some: slice, column: int, width: int) -> tuple[Tensor, Tensor]:
        """The positions whose token lies in these columns, and where."""
        tokens = self.tokens[some] - column
        at = ((tokens >= 0) & (tokens < width)).nonzero().flatten()
        return at + some.start, tokens[at]

    def merge(self, other: TokenScores) -> None:
        """Take in another part of the vocabulary for the same positions."""
        self.softmax.merge(other.softmax)
        mine = ~self.logits.isnan()
        self.logits = torch.where(mine, self.logits, other.logits)
        self.off = torch.where(mine, self.off, other.off)

    def to_cpu(self) -> None:
        """Move to the CPU."""
        self.softmax.to_cpu()
        for name in ("tokens", "logits", "off"):
            setattr(self, name, getattr(self, name).cpu())

    @property
    def log_sum_exp(self) -> Tensor:
        """Of all logits, float64 [P]."""
        peak, mass = self.softmax.peak.double(), self.softmax.mass.double()
        return torch.where(mass > 0, peak + mass.log(), peak)

    @property
    def log_probs(self) -> Tensor:
        """The log-probability of each position's token, float64 [P]; NaN where there is none."""
        return self.logits.double() - self.log_sum_exp

    @property
    def allowed(self) -> Tensor:
        """How far a log-probability that was computed in float32 may be off, float64 [P].

        With p the probability of the token and U_j the sum of the bounds of its logit and of
        logit j, a log-probability moves by at most log(1 + sum over j of p_j (exp(U_j) - 1)),
        the token itself left out: nearly the weighted mean of the U_j. Float32's own rounding of
        the difference and of the sum is added.
        """
        lse, own = self.log_sum_exp, self.logits.double()
        scores = own - lse
        moved = torch.zeros_like(scores)
        if self._bound is not None:
            token = self.off.double().expm1()
            others = (self.softmax.lead / self.softmax.mass).double()
            share = (1 + token) * others - scores.expm1() * token
            moved = share.clamp_min(0).log1p()
        return moved + 2 * EPS * (own.abs() + lse.abs()) + 8 * EPS * (1 + scores.abs())


def _allowed(
    bound: ErrorBound, logits: Tensor, norms: RowsAndColumns, part: slice, out: Tensor
) -> None:
    """What every logit may be off by, when the bound's relative part is of a logit that may be
    off by as much."""
    torch.abs(logits, out=out).mul_(bound.relative).add_(bound.absolute)
    if bound.accumulation and norms.rows is not None and norms.columns is not None:
        out.addcmul_(norms.rows[part, None] * bound.accumulation, norms.columns[None])
    if bound.operand and norms.rows4 is not None and norms.columns4 is not None:
        out.addcmul_(norms.rows4[part, None] * bound.operand, norms.columns4[None])
    out.div_(1 - bound.relative)
