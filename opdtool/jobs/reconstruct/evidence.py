"""What a diagnosis asks of the files: a few positions, a few columns, and a pass over the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.teacher_evidence import Facts, Spots, Unexplained
from opdtool.core.offsets import Ints
from opdtool.core.rebuild import RIGHT, Variant, slots_of
from opdtool.core.teacher import rms_norm
from opdtool.jobs.reconstruct.bounds import variant_bound
from opdtool.jobs.reconstruct.files import Files
from opdtool.jobs.reconstruct.merge import Compared, Part
from opdtool.jobs.reconstruct.plan import Plan

HEAD_ROWS = 4096
"""Rows of a head that a sample is multiplied with at a time."""
STRETCH = 256
"""Positions whose hidden states are held at a time."""
SAMPLED = 1 << 22
"""Elements of the reference that are looked at together."""

Left = tuple[int, list[tuple[int, int, int]]]
"""How many elements a variant does not explain, and (cp rank, slot, column) of the first."""
Confirm = Callable[[Variant, int], Left]


class FileEvidence:
    """Sampled access to the two sides that a plan compares."""

    def __init__(
        self,
        files: Files,
        plan: Plan,
        parts: Sequence[Part],
        found: Compared,
        confirm: Confirm,
    ) -> None:
        self.files, self.plan, self.parts, self.found = files, plan, parts, found
        self._confirm = confirm
        self._read: list[tuple[Spots, Ints, Tensor]] = []
        self.facts = _facts(plan, found)
        results = [part.result for part in parts]
        self._all = Spots(
            cp_rank=np.concatenate([np.full(len(r.slots), r.cp_rank, np.int64) for r in results]),
            slot=np.concatenate([r.slots for r in results]),
            unit=found.unit,
            position=found.position,
        )
        self._lse = np.concatenate(
            [
                part.result.comparison.rebuilt.log_sum_exp.numpy()
                for part in parts
                if part.result.comparison is not None
            ]
        )

    def spots(self, wrong: int, any_: int) -> Spots:
        """Positions: up to ``wrong`` that mismatch, spread evenly, and ``any_`` of all."""
        bad = np.flatnonzero(self.found.worst > 1)
        some = _spread(bad, wrong)
        rest = _spread(np.arange(len(self._all), dtype=np.int64), any_)
        chosen = np.concatenate([some, rest[~np.isin(rest, some)]])
        return self._all.take(chosen)

    def unit_spots(self, limit: int) -> Spots:
        """One position of each unit: its worst one, for it tells most."""
        order = np.lexsort((-self.found.worst, self._all.unit))
        units, first = np.unique(self._all.unit[order], return_index=True)
        return self._all.take(_spread(order[first], limit) if len(units) > limit else order[first])

    def spots_at(self, unit: Ints, position: Ints) -> Spots:
        """Given positions of units, those that were compared."""
        width = int(self._all.position.max(initial=0)) + 1
        here = (position >= 0) & (position < width)
        wanted = unit[here] * width + position[here]
        own = self._all.unit * width + self._all.position
        return self._all.take(np.flatnonzero(np.isin(own, wanted)))

    def wrong_columns(self) -> Ints:
        """Columns of the first mismatches."""
        return np.asarray(sorted({e.column for e in self.found.first}), np.int64)

    def length(self, unit: int) -> int:
        """Real positions of a unit that the payload holds."""
        every = np.arange(int(self.plan.lengths[unit]), dtype=np.int64)
        return int((self.plan.grid.flat(np.full_like(every, unit), every) >= 0).sum())

    def recorded(self, spots: Spots, columns: Ints) -> Tensor:
        """The reference at spots and columns, float32 [n, m]. The last few are kept."""
        for asked, wanted, values in self._read:
            if asked is spots and wanted is columns:
                return values
        values = self._recorded(spots, columns)
        self._read = [*self._read[-3:], (spots, columns, values)]
        return values

    def _recorded(self, spots: Spots, columns: Ints) -> Tensor:
        plan = self.plan
        assert plan.reference is not None
        out = torch.empty(len(spots), len(columns))
        for cp_rank in np.unique(spots.cp_rank).tolist():
            mine = np.flatnonzero(spots.cp_rank == cp_rank)
            if len(columns):
                values = self.files.logits(
                    plan.reference,
                    spots.slot[mine],
                    spots.unit[mine],
                    spots.position[mine],
                    cp_rank,
                    columns,
                )
                out[torch.from_numpy(mine)] = values.float()
        return out

    def only_padding(self) -> bool:
        """Whether the columns that only one side has are padding: of the reference, one value at
        every position; of the rebuilt logits, rows of zeros in every head."""
        low, high = sorted((self.facts.columns, self.facts.reference_columns))
        plan = self.plan
        if self.facts.reference_columns < self.facts.columns:
            if plan.kind == "logits":
                return False
            rows = (
                slice(c, min(c + HEAD_ROWS, high))
                for c in range(low, min(high, plan.real), HEAD_ROWS)
            )
            return not any(
                bool(self.files.head_rows(head, some).any())
                for some in rows
                for head in plan.heads.values()
            )
        value: Tensor | None = None
        step = max(1, SAMPLED // (high - low))
        for first in range(0, len(self._all), step):
            every = np.arange(first, min(first + step, len(self._all)), dtype=np.int64)
            found = self._recorded(self._all.take(every), np.arange(low, high, dtype=np.int64))
            value = found[:1, :1] if value is None else value
            if not bool(((found == value) | (found.isnan() & value.isnan())).all()):
                return False
        return True

    def variant(self, spots: Spots, columns: Ints, variant: Variant) -> tuple[Tensor, Tensor]:
        """What a fault would have made at spots and columns, NaN where it is not judged."""
        plan = self.plan
        source, unit = self._behind(spots, variant)
        made = torch.full((len(spots), len(columns)), torch.nan)
        allowed = torch.zeros(len(spots), len(columns))
        rows = np.flatnonzero(source >= 0)
        if len(rows):
            there = torch.from_numpy(rows)
            made[there], allowed[there] = self._columns(source[rows], unit[rows], columns, variant)
            if variant.log_probs:
                sums = self._sums(source[rows], unit[rows], variant.summed, variant.over_vocabulary)
                made[there] -= sums[:, None]
        if plan.columns > plan.real:  # padding columns hold zeros
            judged = columns < (variant.columns or plan.columns)
            made[:, torch.from_numpy((columns >= plan.real) & judged)] = 0.0
        bound = variant_bound(plan, variant)
        recorded = self.recorded(spots, columns).abs().nan_to_num(0.0, 0.0, 0.0)
        return made, allowed + bound.relative * recorded

    def tokens(self, unit: Ints, position: Ints, columns: Ints, variant: Variant) -> Tensor:
        """What a fault makes of tokens, wherever it then puts them."""
        flat = self.plan.grid.flat(unit, position)
        parts = [  # a few at a time: hidden states are wide
            self._columns(flat[low : low + STRETCH], unit[low : low + STRETCH], columns, variant)[0]
            for low in range(0, len(flat), STRETCH)
        ]
        return torch.cat(parts) if parts else torch.empty(0, len(columns))

    def whole(self, spots: Spots, variant: Variant) -> Tensor:
        """What a fault makes at spots of the whole vocabulary."""
        source, unit = self._behind(spots, variant)
        every = np.arange(self.plan.vocabulary, dtype=np.int64)
        made = torch.full((len(spots), len(every)), torch.nan)
        rows = np.flatnonzero(source >= 0)
        if len(rows):
            heads = self._routes(variant)[unit[rows]]
            made[torch.from_numpy(rows)] = self._made(source[rows], heads, every, variant)[0]
        return made

    def targets(self) -> Ints:
        """The column of the whole vocabulary that each compared column is."""
        if self.plan.draft is not None:
            return self.plan.draft
        return np.arange(min(self.facts.columns, self.facts.reference_columns), dtype=np.int64)

    def _behind(self, spots: Spots, variant: Variant) -> tuple[Ints, Ints]:
        """The payload token behind each spot, -1 for none, and the unit it is of."""
        source = np.full(len(spots), -1, np.int64)
        unit = spots.unit.copy()
        for cp_rank in np.unique(spots.cp_rank).tolist():
            mine = np.flatnonzero(spots.cp_rank == cp_rank)
            slots = slots_of(self.plan.layout, cp_rank, self.plan.grid, variant, self.plan.lengths)
            source[mine] = slots.source[spots.slot[mine]]
            unit[mine] = slots.source_unit[spots.slot[mine]]
        return source, unit

    def _routes(self, variant: Variant) -> Ints:
        if variant.routes is None:
            return self.plan.routes
        return np.asarray(variant.routes, np.int64)

    def _columns(
        self, source: Ints, unit: Ints, columns: Ints, variant: Variant
    ) -> tuple[Tensor, Tensor]:
        """Logits of payload tokens in columns as a fault fills them, NaN where it is not judged;
        and what a product may be off by."""
        plan = self.plan
        shifted = columns + variant.column_shift
        judged = (shifted >= 0) & (shifted < plan.real) & (columns < (variant.columns or plan.real))
        own = np.flatnonzero(judged)
        wanted = shifted[own] if plan.draft is None else plan.draft[shifted[own]]
        wanted = wanted + variant.target_shift
        inside = (wanted >= 0) & (wanted < plan.vocabulary)
        own, wanted = own[inside], wanted[inside]
        made = torch.full((len(source), len(columns)), torch.nan)
        slack = torch.zeros(len(source), len(columns))
        if len(own):
            at = torch.from_numpy(own)
            made[:, at], slack[:, at] = self._made(
                source, self._routes(variant)[unit], wanted, variant
            )
        return made, slack

    def _made(
        self, source: Ints, head: Ints, wanted: Ints, variant: Variant
    ) -> tuple[Tensor, Tensor]:
        """Logits of payload tokens through given heads, in given columns of the vocabulary; and
        what a product may be off by."""
        plan, files = self.plan, self.files
        bound = variant_bound(plan, variant)
        if plan.kind == "logits":
            made = files.tokens(plan.payload, source, wanted).float()
            slack = torch.full(made.shape, bound.absolute)
        else:
            made = torch.empty(len(source), len(wanted))
            slack = torch.empty(len(source), len(wanted))
            hidden = files.tokens(plan.payload, source)
            for index in np.unique(head).tolist():
                rows = torch.from_numpy(np.flatnonzero(head == index))
                for low in range(0, len(wanted), HEAD_ROWS):
                    some = slice(low, low + HEAD_ROWS)
                    product, off = self._product(hidden[rows], index, wanted[some], variant)
                    made[rows, some], slack[rows, some] = product, off + bound.absolute
        scale = None if variant.unscaled else plan.scale
        softcap = None if variant.uncapped else plan.softcap
        for factor, cap in ((scale, softcap), (variant.factor, variant.softcap)):
            if factor is not None and factor != 1.0:
                made = made * factor
            if cap is not None:
                made = cap * (made / cap).tanh()
        if bound.given and plan.compute.itemsize < 4:
            made = made.to(plan.compute).float()  # a given tolerance is of what is written
        return made, slack

    def _sums(self, source: Ints, unit: Ints, variant: Variant, over_vocabulary: bool) -> Tensor:
        """The log-sum-exps of the logits that a variant makes of payload tokens."""
        if _moves_only(variant) and not over_vocabulary:
            own = self.plan.grid.flat(self._all.unit, self._all.position)
            order = np.argsort(own)
            return torch.from_numpy(self._lse[order[np.searchsorted(own[order], source)]])
        every = np.arange(self.plan.vocabulary, dtype=np.int64)
        ids = every if over_vocabulary else self.targets()
        heads, total = self._routes(variant)[unit], torch.full((len(source),), -torch.inf)
        for low in range(0, len(ids), HEAD_ROWS):
            made, _ = self._made(source, heads, ids[low : low + HEAD_ROWS], variant)
            total = torch.logaddexp(total, made.logsumexp(dim=-1))
        return total

    def _product(
        self, hidden: Tensor, index: int, columns: Ints, variant: Variant
    ) -> tuple[Tensor, Tensor]:
        plan, bound = self.plan, variant_bound(self.plan, variant)
        head = plan.heads[index]
        norm = {"asked": head.norm, "none": None, "beside": head.beside}[variant.norm]
        if norm is not None:
            weight = self.files.norm_weight(norm)
            hidden = rms_norm(hidden, weight, eps=norm.eps, offset=norm.offset)
        x = hidden.to(plan.compute).float()
        if variant.transposed:
            w = self.files.head_rows(head, slice(0, plan.vocabulary)).t()[torch.from_numpy(columns)]
        elif bool((np.diff(columns) == 1).all()):
            w = self.files.head_rows(head, slice(int(columns[0]), int(columns[-1]) + 1))
        else:
            w = self.files.head_rows(head, columns)
        w = w.to(plan.compute).float()
        off = bound.accumulation * x.norm(dim=-1)[:, None] * w.norm(dim=-1)[None]
        if bound.operand:
            off = off + bound.operand * x.norm(4, dim=-1)[:, None] * w.norm(4, dim=-1)[None]
        return x @ w.t(), off

    def hidden(self, spots: Spots) -> Tensor:
        """The payload's hidden states at spots, float32 [n, H]."""
        source = self.plan.grid.flat(spots.unit, spots.position)
        return self.files.tokens(self.plan.payload, source).float()

    def norm_weight(self, head: int) -> Tensor:
        """The weight that the norm beside a head multiplies by, float32 [H]."""
        norm = self.plan.heads[head].beside
        assert norm is not None
        return self.files.norm_weight(norm).float() + norm.offset

    def log_sum_exp(
        self, spots: Spots, variant: Variant, *, over_vocabulary: bool = False
    ) -> Tensor:
        """Of the logits that a fault makes, NaN where it is not judged."""
        source, unit = self._behind(spots, variant)
        sums = torch.full((len(spots),), torch.nan)
        rows = np.flatnonzero(source >= 0)
        if len(rows):
            found = self._sums(source[rows], unit[rows], variant.summed, over_vocabulary)
            sums[torch.from_numpy(rows)] = found
        return sums

    def confirm(self, variant: Variant, bear: int) -> Unexplained:
        """What of the whole reference is not what the variant makes, where it is judged."""
        count, places = self._confirm(variant, bear)
        cp_rank, slot, columns = (
            np.asarray([place[k] for place in places], np.int64) for k in range(3)
        )
        at = self._lookup(cp_rank, slot)
        return Unexplained(count, self._all.take(at), columns)

    def _lookup(self, cp_rank: Ints, slot: Ints) -> Ints:
        """Where ranks' slots are among all that were compared."""
        key = self._all.cp_rank * self.plan.layout.local_total + self._all.slot
        order = np.argsort(key)
        wanted = cp_rank * self.plan.layout.local_total + slot
        found: Ints = order[np.searchsorted(key[order], wanted)]
        return found


def _facts(plan: Plan, found: Compared) -> Facts:
    assert plan.reference is not None
    assert plan.bound is not None
    precision = plan.precision or plan.reference.dtype
    reference = plan.reference
    return Facts(
        units=plan.layout.num_segments,
        routes=tuple(plan.routes.tolist()),
        heads=tuple(sorted(plan.heads)),
        vocabulary=plan.vocabulary,
        width=plan.width,
        draft=plan.draft is not None,
        columns=plan.columns,
        reference_columns=plan.columns if reference.gathered else reference.width,
        tp_size=plan.tp_size,
        cp_size=plan.cp_size,
        packed=plan.packed,
        sharded_by_cp=reference.cp_size > 1,
        uneven=reference.uneven,
        normed=any(head.norm is not None for head in plan.heads.values()),
        beside=_all_beside(plan),
        mismatches=found.mismatches,
        equal=found.exact,
        given=plan.bound.given,
        coarser=torch.finfo(precision).eps > torch.finfo(plan.compute).eps,
        precision=str(precision).removeprefix("torch."),
        relative=plan.bound.relative,
        scale=plan.scale,
        softcap=plan.softcap,
        output_eps=torch.finfo(plan.compute).eps if plan.compute.itemsize < 4 else 0.0,
    )


def _all_beside(plan: Plan) -> bool:
    """Whether every head that is used has a norm beside it."""
    used = [plan.heads[index] for index in set(plan.routes.tolist()) if index in plan.heads]
    return bool(used) and all(head.beside is not None for head in used)


def _moves_only(variant: Variant) -> bool:
    """Whether the logits are the right ones, if in other places."""
    return replace(variant, position_shift=0, arrangement="zigzag", cp_order=None) == RIGHT


def _spread(values: Ints, count: int) -> Ints:
    """At most ``count`` of the values, evenly chosen."""
    if len(values) <= count:
        return values
    at = np.linspace(0, len(values) - 1, count).astype(np.int64)
    chosen: Ints = values[np.unique(at)]
    return chosen
