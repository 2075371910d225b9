"""A teacher small enough to be held whole: the plainest evidence that a diagnosis can ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.teacher_evidence import Facts, Ints, Spots, Unexplained
from opdtool.core.rebuild import RIGHT, Variant


@dataclass(eq=False)
class Memory:
    """Hidden ``states`` [B, S, H], heads [V, H], norms [H]; ``reference`` is what was recorded.

    Everything is made whole for any question, and kept.
    """

    states: Tensor
    heads: Mapping[int, Tensor]
    routes: Sequence[int]
    reference: Tensor = field(default_factory=lambda: torch.empty(0))
    norms: Mapping[int, Tensor] = field(default_factory=dict)
    normed: bool = False
    draft: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    tp_size: int = 1
    cp_size: int = 1
    uneven: bool = False
    wider: int = 0
    """Columns that the reference has beyond those that are compared."""
    padding: bool = True
    """Whether those columns, or the head's rows that the reference lacks, are padding."""
    coarser: bool = False
    given: bool = False
    tolerance: float = 1e-4
    confirmed: list[Variant] = field(default_factory=list)
    _made: dict[tuple[Variant, int], Tensor] = field(default_factory=dict, init=False)
    _rows: dict[tuple[Variant, int], Tensor] = field(default_factory=dict, init=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.states.shape[0], self.states.shape[1]

    def held(self, position: int, variant: Variant) -> int:
        """The position whose logits are stored where those of ``position`` belong."""
        if self.cp_size == 1:
            return position
        S, cp = self.shape[1], self.cp_size
        local, chunk = S // cp, S // (2 * cp)
        windows = [
            [*range(r * chunk, (r + 1) * chunk), *range(S - (r + 1) * chunk, S - r * chunk)]
            for r in range(cp)
        ]
        rank = next(r for r in range(cp) if position in windows[r])
        at = windows[rank].index(position)
        if variant.arrangement == "contiguous":
            return rank * local + at
        if variant.cp_order is not None:
            return int(windows[variant.cp_order[rank]][at])
        return position

    def rows(self, variant: Variant) -> Tensor:
        """The whole vocabulary at every token, wherever it is then put: [B, S, V]."""
        variant = replace(variant.summed, position_shift=0, cp_order=None, arrangement="zigzag")
        key = (variant, self.states._version)
        if key not in self._rows:
            units = [self._rows_of(b, variant) for b in range(self.shape[0])]
            self._rows[key] = torch.stack(units)
        return self._rows[key]

    def _rows_of(self, b: int, variant: Variant) -> Tensor:
        head = (self.routes if variant.routes is None else variant.routes)[b]
        x = self.states[b]
        norm = {"asked": self.normed, "none": False, "beside": True}[variant.norm]
        if norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norms[head]
        w = self.heads[head]
        y = x @ w if variant.transposed else x @ w.t()
        if self.scale is not None and not variant.unscaled:
            y = y * self.scale
        if self.softcap is not None and not variant.uncapped:
            y = self.softcap * (y / self.softcap).tanh()
        y = y * variant.factor
        if variant.softcap is not None:
            y = variant.softcap * (y / variant.softcap).tanh()
        return y

    def make(self, variant: Variant = RIGHT) -> Tensor:
        """What a variant makes of everything, NaN where it is not judged: [B, S, columns]."""
        key = (variant, self.states._version)
        if key not in self._made:
            self._made[key] = self._make(variant)
        return self._made[key].clone()

    def _make(self, variant: Variant) -> Tensor:
        B, S = self.shape
        whole = self.rows(variant)
        V = whole.shape[2]
        columns = list(range(V)) if self.draft is None else self.draft.tolist()
        targets = [self._target(j, columns, V, variant) for j in range(len(columns))]
        own = [j for j, target in enumerate(targets) if target is not None]
        taken = [target for target in targets if target is not None]
        out = torch.full((B, S, len(columns)), torch.nan)
        for s in range(S):
            source = self.held(s, variant) + variant.position_shift
            if 0 <= source < S:
                y = whole[:, source]
                over = y if variant.over_vocabulary else y[:, columns]
                less = over.logsumexp(-1, keepdim=True) if variant.log_probs else torch.zeros(B, 1)
                out[:, s, own] = y[:, taken] - less
        return out

    def _target(self, j: int, columns: list[int], V: int, variant: Variant) -> int | None:
        """The column of the vocabulary that column j is filled with, if it is judged."""
        at = j + variant.column_shift
        if not 0 <= at < len(columns) or j >= (variant.columns or len(columns)):
            return None
        target = columns[at] + variant.target_shift
        return target if 0 <= target < V else None

    @property
    def facts(self) -> Facts:
        right = self.make()
        return Facts(
            units=self.shape[0],
            routes=tuple(self.routes),
            heads=tuple(sorted(self.heads)),
            vocabulary=len(self.heads[self.routes[0]]),
            width=self.states.shape[2],
            draft=self.draft is not None,
            columns=right.shape[2],
            reference_columns=self.reference.shape[2] + self.wider,
            tp_size=self.tp_size,
            cp_size=self.cp_size,
            packed=False,
            sharded_by_cp=self.cp_size > 1,
            uneven=self.uneven,
            normed=self.normed,
            beside=bool(self.norms),
            mismatches=int(self._wrong(right).sum()),
            equal=bool(torch.equal(right, self.reference)),
            given=self.given,
            coarser=self.coarser,
            precision="float32",
            relative=1e-6,
            scale=self.scale,
            softcap=self.softcap,
        )

    def _wrong(self, made: Tensor, slack: float = 0.0) -> Tensor:
        shared = self.reference[..., : made.shape[2]]
        made = made[..., : shared.shape[2]]
        near = ((made - shared).abs() <= self.tolerance + slack) | (made == shared)
        return ~made.isnan() & ~near

    def _spots(self, at: Sequence[tuple[int, int]]) -> Spots:
        unit = np.asarray([b for b, _ in at], np.int64)
        position = np.asarray([s for _, s in at], np.int64)
        rank = np.zeros_like(unit)
        if self.cp_size > 1:
            chunk = self.shape[1] // (2 * self.cp_size)
            rank = np.minimum(position // chunk, 2 * self.cp_size - 1 - position // chunk)
        return Spots(
            cp_rank=rank, slot=unit * self.shape[1] + position, unit=unit, position=position
        )

    def spots(self, wrong: int, any_: int) -> Spots:
        bad = self._wrong(self.make()).any(dim=-1)
        every = [(b, s) for b in range(self.shape[0]) for s in range(self.shape[1])]
        worst = [at for at in every if bad[at]][:wrong]
        return self._spots([*worst, *[at for at in every if at not in worst][:any_]])

    def unit_spots(self, limit: int) -> Spots:
        bad = self._wrong(self.make()).sum(dim=-1)
        return self._spots([(b, int(bad[b].argmax())) for b in range(self.shape[0])][:limit])

    def spots_at(self, unit: Ints, position: Ints) -> Spots:
        return self._spots(list(zip(unit.tolist(), position.tolist(), strict=True)))

    def wrong_columns(self) -> Ints:
        found = self._wrong(self.make()).any(dim=0).any(dim=0).nonzero().flatten()[:10]
        return found.numpy()

    def length(self, unit: int) -> int:
        return self.shape[1]

    def recorded(self, spots: Spots, columns: Ints) -> Tensor:
        return self.reference[spots.unit, spots.position][:, columns].float()

    def variant(self, spots: Spots, columns: Ints, variant: Variant) -> tuple[Tensor, Tensor]:
        made = self.make(variant)[spots.unit, spots.position][:, columns]
        return made, torch.full(made.shape, self.tolerance + variant.slack)

    def tokens(self, unit: Ints, position: Ints, columns: Ints, variant: Variant) -> Tensor:
        still = replace(variant, position_shift=0, cp_order=None, arrangement="zigzag")
        return self.make(still)[unit, position][:, columns]

    def whole(self, spots: Spots, variant: Variant) -> Tensor:
        out = torch.full((len(spots), self.facts.vocabulary), torch.nan)
        for k, (b, s) in enumerate(zip(spots.unit, spots.position, strict=True)):
            source = self.held(int(s), variant) + variant.position_shift
            if 0 <= source < self.shape[1]:
                out[k] = self.rows(variant)[int(b), source]
        return out

    def targets(self) -> Ints:
        columns = torch.arange(self.facts.vocabulary) if self.draft is None else self.draft
        return columns.numpy()

    def hidden(self, spots: Spots) -> Tensor:
        return self.states[spots.unit, spots.position]

    def norm_weight(self, head: int) -> Tensor:
        return self.norms[head]

    def log_sum_exp(
        self, spots: Spots, variant: Variant, *, over_vocabulary: bool = False
    ) -> Tensor:
        whole = self.whole(spots, variant)
        if self.draft is not None and not over_vocabulary:
            whole = whole[:, self.draft]
        return whole.logsumexp(dim=-1)

    def only_padding(self) -> bool:
        return self.padding

    def confirm(self, variant: Variant, bear: int) -> Unexplained:
        self.confirmed.append(variant)
        places = self._wrong(self.make(variant), variant.slack).nonzero()
        if len(places) > bear:
            return Unexplained(len(places), self._spots([]), np.empty(0, np.int64))
        at = [(int(b), int(s)) for b, s, _ in places]
        return Unexplained(len(places), self._spots(at), places[:, 2].numpy())
