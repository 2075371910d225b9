"""What a diagnosis asks of the files: a few positions, a few columns, and a pass over the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.teacher_evidence import Facts, Spots, Unexplained
from opdtool.core.offsets import Ints
from opdtool.core.rebuild import Norm, Variant, slots_of
from opdtool.core.teacher import rms_norm
from opdtool.jobs.reconstruct.bounds import variant_bound
from opdtool.jobs.reconstruct.files import Files
from opdtool.jobs.reconstruct.merge import Compared, Part
from opdtool.jobs.reconstruct.plan import Plan

HEAD_ROWS = 4096
"""Rows of a head that a sample is multiplied with at a time."""

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

    def wrong_columns(self) -> Ints:
        """Columns of the first mismatches."""
        return np.asarray(sorted({e.column for e in self.found.first}), np.int64)

    def length(self, unit: int) -> int:
        """Positions of a unit that the payload holds."""
        every = np.arange(int(self.plan.layout.padded_lengths[unit]), dtype=np.int64)
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
            for tp_rank in range(plan.tp_size):
                window = plan.window(tp_rank)
                own = np.flatnonzero((columns >= window.start) & (columns < window.stop))
                if len(own) == 0:
                    continue
                values = self.files.logits(
                    plan.reference,
                    spots.slot[mine],
                    spots.unit[mine],
                    spots.position[mine],
                    tp_rank,
                    cp_rank,
                    columns[own],
                )
                at = torch.from_numpy(mine)[:, None], torch.from_numpy(own)[None]
                out[at] = values.float()
        return out

    def rebuilt(
        self, unit: Ints, position: Ints, head: Ints, columns: Ints, *, norm: Norm = "asked"
    ) -> tuple[Tensor, Tensor]:
        """Logits at tokens through given heads, and the bounds' absolute part."""
        variant = Variant(norm=norm)
        return self._made(self.plan.grid.flat(unit, position), head, columns, variant)

    def variant(self, spots: Spots, columns: Ints, variant: Variant) -> tuple[Tensor, Tensor]:
        """What a fault would have made at spots and columns, NaN where it is not judged."""
        plan = self.plan
        source = np.full(len(spots), -1, np.int64)
        unit = spots.unit.copy()
        for cp_rank in np.unique(spots.cp_rank).tolist():
            mine = np.flatnonzero(spots.cp_rank == cp_rank)
            slots = slots_of(plan.layout, cp_rank, plan.grid, variant)
            source[mine] = slots.source[spots.slot[mine]]
            unit[mine] = slots.source_unit[spots.slot[mine]]
        shifted = columns + variant.column_shift
        judged = (shifted >= 0) & (shifted < plan.real) & (columns < (variant.columns or plan.real))
        routes = plan.routes if variant.routes is None else np.asarray(variant.routes, np.int64)
        made = torch.full((len(spots), len(columns)), torch.nan)
        allowed = torch.zeros(len(spots), len(columns))
        rows, own = np.flatnonzero(source >= 0), np.flatnonzero(judged)
        if len(rows) and len(own):
            values, slack = self._made(source[rows], routes[unit[rows]], shifted[own], variant)
            if variant.log_probs:
                values = values - self.log_sum_exp(spots.take(rows))[:, None]
            at = torch.from_numpy(rows)[:, None], torch.from_numpy(own)[None]
            made[at], allowed[at] = values, slack
        if plan.columns > plan.real:  # padding columns hold zeros
            made[:, torch.from_numpy(columns >= plan.real)] = 0.0
        bound = variant_bound(plan, variant)
        recorded = self.recorded(spots, columns).abs().nan_to_num(0.0, 0.0, 0.0)
        return made, allowed + bound.relative * recorded

    def _made(
        self, source: Ints, head: Ints, columns: Ints, variant: Variant
    ) -> tuple[Tensor, Tensor]:
        """Logits of payload tokens through given heads; and what a product may be off by."""
        plan, files = self.plan, self.files
        bound = variant_bound(plan, variant)
        wanted = columns if plan.draft is None else plan.draft[columns]
        if plan.kind == "logits":
            made = files.tokens(plan.payload, source, wanted).float()
            slack = torch.full(made.shape, bound.absolute)
        else:
            made = torch.empty(len(source), len(columns))
            slack = torch.empty(len(source), len(columns))
            hidden = files.tokens(plan.payload, source)
            for index in np.unique(head).tolist():
                rows = torch.from_numpy(np.flatnonzero(head == index))
                for low in range(0, len(columns), HEAD_ROWS):
                    some = slice(low, low + HEAD_ROWS)
                    product, off = self._product(hidden[rows], index, wanted[some], variant)
                    made[rows, some], slack[rows, some] = product, off + bound.absolute
        factor = (plan.scale or 1.0) * variant.factor
        if factor != 1.0:
            made = made * factor
        for cap in (plan.softcap, variant.softcap):
            if cap is not None:
                made = cap * (made / cap).tanh()
        return made, slack

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
        elif len(columns) > 1 and columns[-1] - columns[0] == len(columns) - 1:
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

    def log_sum_exp(self, spots: Spots) -> Tensor:
        """Of the rebuilt logits, float32 [n]."""
        return torch.from_numpy(self._lse[self._lookup(spots.cp_rank, spots.slot)])

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
        columns=plan.columns,
        reference_columns=plan.columns if reference.gathered else reference.width,
        tp_size=plan.tp_size,
        cp_size=plan.cp_size,
        packed=plan.packed,
        sharded_by_cp=reference.cp_size > 1,
        uneven=reference.uneven,
        normed=any(head.norm is not None for head in plan.heads.values()),
        beside=bool(plan.heads) and all(head.beside is not None for head in plan.heads.values()),
        mismatches=found.mismatches,
        equal=found.exact,
        coarser=torch.finfo(precision).eps > torch.finfo(plan.compute).eps,
        precision=str(precision).removeprefix("torch."),
        relative=plan.bound.relative,
        accumulation=plan.bound.accumulation,
        output_eps=torch.finfo(plan.compute).eps if plan.compute.itemsize < 4 else 0.0,
    )


def _spread(values: Ints, count: int) -> Ints:
    """At most ``count`` of the values, evenly chosen."""
    if len(values) <= count:
        return values
    at = np.linspace(0, len(values) - 1, count).astype(np.int64)
    chosen: Ints = values[np.unique(at)]
    return chosen
