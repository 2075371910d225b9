"""One rank's teacher logits, streamed: read a slice, multiply, compare or write it, forget it.

A rank's slots are taken in blocks of hidden states that fit in memory, each block in tiles of
positions by slices of the vocabulary. One thread reads the next tile while this one is
computed. Blocks, tiles and slices follow from the plan and the rank alone, never from how the
ranks are run, so that the bytes that are written are the same.

Legend: P positions of a tile, v columns of a slice, H width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from opdtool.core.bounds import RowsAndColumns
from opdtool.core.compare import Comparison
from opdtool.core.divergence import DivergenceSums, SoftmaxSums
from opdtool.core.rebuild import RIGHT, Variant
from opdtool.core.scores import TokenScores
from opdtool.core.teacher import rms_norm
from opdtool.jobs.reconstruct.bounds import summing_order, variant_bound
from opdtool.jobs.reconstruct.files import Files, runs
from opdtool.jobs.reconstruct.plan import HeadAt, Plan
from opdtool.jobs.reconstruct.results import Extent, RankResult
from opdtool.jobs.reconstruct.sizes import Room, is_wide, norms_of, sizes_for
from opdtool.jobs.reconstruct.tiles import Tile, Tiles

WriteTile = Callable[[int, int, Tensor], None]
"""(first slot, first column of the rank's window, logits [P, v]) to the rank's file."""


def run_rank(
    files: Files,
    plan: Plan,
    tp_rank: int,
    cp_rank: int,
    device: torch.device,
    *,
    variant: Variant = RIGHT,
    write: WriteTile | None = None,
    log_sum_exp: Tensor | None = None,
    bear: int | None = None,
    sums: bool = False,
    share: tuple[int, int] = (0, 1),
    advance: Callable[[int], None] = lambda amount: None,
) -> RankResult:
    """Rebuild, and compare or write, all logits of one rank.

    ``variant`` other than the right one makes what a fault would have made, to compare it alone
    with the reference; ``log_sum_exp`` [slots] is for a variant that subtracts it, and
    ``bear`` is how many mismatches it may have before the rest is not looked at, and how many
    are listed. ``sums`` asks for the softmax sums of the logits and for nothing else. ``share``
    (i, n) takes every n-th tile of positions alone, from tile i on.
    """
    with torch.no_grad():
        student = plan.student is not None and variant == RIGHT and not sums
        tiles = Tiles(
            files,
            plan,
            (tp_rank, cp_rank),
            variant,
            sizes_for(plan),
            device=device,
            share=share,
            student=student,
        )
        worker = _Worker(tiles, log_sum_exp)
        if bear is not None and worker.result.comparison is not None:
            worker.result.comparison.limit = max(bear, 1)
        if sums:
            worker.result.softmax = SoftmaxSums(len(tiles.order), device)
        for tile in tiles:
            worker.take(tile, write)
            advance(len(tile.rows) * (tile.columns.stop - tile.columns.start))
            found = worker.result.comparison
            if bear is not None and found is not None and found.mismatches > bear:
                break
        if variant == RIGHT and not sums:
            worker.compare_padding()
        if write is not None:
            worker.write_padding(write)
            # What lies behind the real tokens is written, and judged by nobody.
            rest = replace(plan, reference=None, bound=None, student=None, scored=None)
            behind = Tiles(
                files, rest, (tp_rank, cp_rank), variant, sizes_for(plan),
                device=device, share=share, padding=True,
            )  # fmt: skip
            padding = _Worker(behind, None)
            for tile in behind:
                padding.take(tile, write)
            padding.write_padding(write)
        return worker.result


class _Worker:
    """The state of one rank's pass."""

    def __init__(self, tiles: Tiles, log_sum_exp: Tensor | None) -> None:
        self.tiles, self.files, self.plan = tiles, tiles.files, tiles.plan
        self.variant, self.device = tiles.variant, tiles.device
        self.sizes, self.order = tiles.sizes, tiles.order
        self.lse = None if log_sum_exp is None else log_sum_exp[torch.from_numpy(self.order)]
        plan, variant, device = self.plan, self.variant, self.device
        count = len(self.order)
        right = variant == RIGHT
        self.result = RankResult(
            tiles.tp_rank,
            tiles.cp_rank,
            self.order,
            tiles.all.unit[self.order],
            tiles.all.position[self.order],
            Extent(),
            share=tiles.share[0],
        )
        if plan.reference is not None and plan.bound is not None:
            bound = variant_bound(plan, variant)
            # What an intermediate dtype overflowed to is infinite in any other, too.
            through = (plan.reference.dtype, plan.precision, plan.compute)
            self.result.comparison = Comparison(
                count,
                bound,
                overflow=torch.float16 if torch.float16 in through else plan.reference.dtype,
                device=device,
                labels=torch.from_numpy(self.order),
                output=plan.compute if right or bound.given else None,
                order=summing_order(plan),
            )
        if tiles.student:
            self.result.divergence = DivergenceSums(count, device)
        if plan.scored is not None and plan.score_bound is not None and right:
            tokens = _tokens_of(plan, self.result)
            self.result.scores = TokenScores(tokens, plan.score_bound, device)
        self.hidden = self.norms = self.head = self.head_norms = None
        self.room = Room(device)

    hidden: Tensor | None
    head: Tensor | None
    norms: tuple[Tensor, Tensor | None] | None
    head_norms: tuple[Tensor, Tensor | None] | None

    def take(self, tile: Tile, write: WriteTile | None) -> None:
        """Rebuild one tile and give it to everybody who wants it."""
        self._load(tile)
        logits = self._rebuild(tile)
        result = self.result
        if tile.off is not None and tile.reference is not None:
            tile.reference = tile.reference.to(self.device).masked_fill(tile.off, 0)
            logits = logits.masked_fill(tile.off, 0)
        if result.comparison is not None and tile.reference is not None:
            shared = tile.reference.shape[1]
            result.comparison.add(
                tile.at.start,
                tile.columns.start,
                logits[:, :shared].float(),
                tile.reference.to(self.device),
                self._row_and_column_norms(tile, shared),
            )
        if result.softmax is not None:
            result.softmax.add(tile.at, logits.float())
            return
        if self.variant != RIGHT:
            return
        final = logits
        if final.dtype != self.plan.compute and (write is not None or self._wants_final()):
            final = self.room("final", logits.shape, self.plan.compute).copy_(logits)
        self._look(tile, final)
        if result.divergence is not None:
            assert tile.student is not None
            result.divergence.add(tile.at, final, tile.student.to(self.device))
        if result.scores is not None:
            norms = self._row_and_column_norms(tile, final.shape[1])
            result.scores.add(tile.at.start, tile.columns.start, final, norms)
        if write is not None:
            slots = self.order[tile.at]
            for offset, start, count in runs(slots):
                part = final[offset : offset + count]
                write(start, tile.columns.start - self.tiles.window.start, part)

    def _load(self, tile: Tile) -> None:
        plan = self.plan
        if tile.hidden is not None:
            self.hidden = None
            self.hidden = self._prepared(tile.hidden, plan.heads[tile.teacher])
            tile.hidden = None
            self.norms = None
            if self._bounded():
                self.norms = norms_of(self.hidden, fours=self._bounded(operand=True))
        if tile.head is not None:
            self.head = None
            self.head = tile.head.to(self.device).to(plan.compute)
            tile.head = None
            if self._multiplies_wide() and self.head.dtype != torch.float32:
                self.head = self.room("head", self.head.shape, torch.float32).copy_(self.head)
            if self._bounded():
                self.head_norms = norms_of(self.head, fours=self._bounded(operand=True))

    def _bounded(self, *, operand: bool = False) -> bool:
        """Whether norms are asked for; with ``operand`` the 4-norms."""
        bounds = (self.plan.bound, self.plan.score_bound)
        if operand:
            own = variant_bound(self.plan, self.variant) if self.plan.bound is not None else None
            return any(bound is not None and bound.operand > 0 for bound in (*bounds, own))
        derived = any(bound is not None and not bound.given for bound in bounds)
        return derived or (self.plan.bound is not None and self.plan.compute.itemsize < 4)

    def _prepared(self, hidden: Tensor, head: HeadAt) -> Tensor:
        """Hidden states as the head wants them: normed, if asked for, and cast."""
        hidden = hidden.to(self.device)
        norm = {"asked": head.norm, "none": None, "beside": head.beside}[self.variant.norm]
        if norm is None:
            return hidden.to(self.plan.compute)
        weight = self.files.norm_weight(norm).to(self.device)
        out = torch.empty(hidden.shape, dtype=self.plan.compute, device=self.device)
        for low in range(0, len(hidden), self.sizes.tile):
            some = slice(low, low + self.sizes.tile)
            out[some] = rms_norm(hidden[some], weight, eps=norm.eps, offset=norm.offset)
        return out

    def _multiplies_wide(self) -> bool:
        # float16 products have no fast kernel on a CPU; float32 ones are several times faster.
        slow = self.plan.compute == torch.float16 and self.device.type == "cpu"
        return self.plan.compute.itemsize < 4 and (is_wide(self.plan) or slow)

    def _rebuild(self, tile: Tile) -> Tensor:
        """The logits of a tile: float32 where they are compared, else in the head's dtype."""
        plan, variant = self.plan, self.variant
        changed = plan.scale is not None or plan.softcap is not None or variant != RIGHT
        if tile.logits is not None:
            logits = tile.logits.to(self.device)
            if (is_wide(plan) or changed) and logits.dtype.itemsize < 4:
                logits = logits.float()
        else:
            assert self.hidden is not None
            assert self.head is not None
            rows = self.hidden[tile.rows.start : tile.rows.stop]
            if self._multiplies_wide():
                rows = self.room("rows", tuple(rows.shape), torch.float32).copy_(rows)
            shape = (len(rows), len(self.head))
            logits = torch.mm(rows, self.head.t(), out=self.room("logits", shape, self.head.dtype))
            if (is_wide(plan) or changed) and logits.dtype.itemsize < 4:
                logits = logits.float()
        scale = None if variant.unscaled else plan.scale
        softcap = None if variant.uncapped else plan.softcap
        for factor, cap in ((scale, softcap), (variant.factor, variant.softcap)):
            if factor is not None and factor != 1.0:
                logits = logits.mul_(factor)
            if cap is not None:
                logits = logits.div_(cap).tanh_().mul_(cap)
        if variant.log_probs:
            assert self.lse is not None
            logits = logits.sub_(self.lse[tile.at, None].to(self.device))
        return logits

    def _row_and_column_norms(self, tile: Tile, columns: int) -> RowsAndColumns:
        if self.norms is None or self.head_norms is None:
            return RowsAndColumns()
        rows = slice(tile.rows.start, tile.rows.stop)
        return RowsAndColumns(
            rows=self.norms[0][rows],
            columns=self.head_norms[0][:columns],
            rows4=None if self.norms[1] is None else self.norms[1][rows],
            columns4=None if self.head_norms[1] is None else self.head_norms[1][:columns],
        )

    def _wants_final(self) -> bool:
        """Whether somebody but the comparison takes the logits, as they would be written."""
        return self.result.divergence is not None or self.result.scores is not None

    def _look(self, tile: Tile, logits: Tensor) -> None:
        # Rounding keeps the order, so the extremes of what is written are those of this, rounded.
        ends = torch.stack(torch.aminmax(logits)).to(self.plan.compute)
        low, high = (float(x) for x in ends)
        extent = self.result.extent
        if not (np.isfinite(low) and np.isfinite(high)):
            logits = logits.to(self.plan.compute)
            finite = logits.isfinite()
            wrong = (~finite).nonzero()
            extent.not_finite += len(wrong)
            for row, column in wrong[: max(0, 10 - len(extent.first))].tolist():
                slot = int(self.order[tile.at.start + row])
                place = (slot, tile.columns.start + column, float(logits[row, column]))
                extent.first.append(place)
            if not bool(finite.any()):
                return
            low, high = float(logits[finite].min()), float(logits[finite].max())
        extent.low, extent.high = min(extent.low, low), max(extent.high, high)

    def compare_padding(self) -> None:
        """Compare what the reference holds in columns that pad the vocabulary: zeros here."""
        plan, tiles, found = self.plan, self.tiles, self.result.comparison
        if found is None or plan.reference is None or plan.reference.gathered:
            return
        low, high = (
            max(tiles.window.start, plan.real),
            min(tiles.window.stop, plan.columns),
        )
        high = min(high, plan.reference.width, self.variant.columns or high)
        for c in range(low, high, self.sizes.columns):
            columns = slice(c, min(c + self.sizes.columns, high))
            for p in range(0, len(self.order), self.sizes.tile):
                slots = self.order[p : p + self.sizes.tile]
                unit, position = tiles.all.unit[slots], tiles.all.position[slots]
                recorded = self.files.logits(
                    plan.reference,
                    slots,
                    unit,
                    position,
                    tiles.cp_rank,
                    columns,
                ).to(self.device)
                zeros = torch.zeros(recorded.shape, device=self.device)
                found.add(p, c, zeros, recorded, RowsAndColumns(), vocabulary=False)

    def write_padding(self, write: WriteTile) -> None:
        """Write the zeros: of slots without a token, and of padding columns."""
        dtype = self.plan.compute
        wide = self.tiles.window.stop - self.tiles.window.start
        real = self.tiles.columns.stop - self.tiles.columns.start
        rows = max(1, self.sizes.tile * self.sizes.columns // max(wide, 1))
        # Slots without a token belong to no tile: the first share writes them, once.
        mine = self.tiles.share[0] == 0 and not self.tiles.padding
        empty = np.flatnonzero((self.tiles.all.source < 0) & mine)
        for slots, first, count in ((empty, 0, wide), (self.order, real, wide - real)):
            if count == 0:
                continue
            for _, start, length in runs(np.sort(slots)):
                for low in range(0, length, rows):
                    some = min(rows, length - low)
                    write(start + low, first, torch.zeros(some, count, dtype=dtype))


def _tokens_of(plan: Plan, result: RankResult) -> Tensor:
    """The token that each slot's logits are asked for, -1 for none."""
    assert plan.scored is not None
    slots = plan.layout.cu_seqlens_padded[result.unit] + result.position
    return torch.from_numpy(plan.scored.token[slots])
