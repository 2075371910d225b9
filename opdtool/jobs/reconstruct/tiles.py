"""One rank's work cut into tiles, each read while the one before is worked on.

Legend: P positions of a tile, v columns of a slice, H width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from opdtool.core.offsets import Ints
from opdtool.core.rebuild import Slots, Variant, slots_of
from opdtool.jobs.reconstruct.files import Files
from opdtool.jobs.reconstruct.plan import Plan
from opdtool.jobs.reconstruct.sizes import Sizes, ahead, judged_columns


@dataclass(slots=True)
class Tile:
    """One piece of work, with what was read for it. ``hidden`` and ``head`` come when they
    are new; ``rows`` indexes the block, ``at`` the rank's order."""

    teacher: int
    rows: range
    at: slice
    columns: slice
    hidden: Tensor | None = None
    head: Tensor | None = None
    logits: Tensor | None = None
    reference: Tensor | None = None
    student: Tensor | None = None
    off: Tensor | None = None
    """Columns that a shift of target ids moved off the vocabulary: not judged."""


class Tiles:
    """The tiles of one rank in order, each read while the one before is worked on.

    ``all`` are all slots of the rank and ``order`` those of this ``share`` that hold a real
    token, each teacher's together, or else, for ``padding``, those that hold another token of the
    payload; ``columns`` are the columns of the rank's ``window`` that are judged. ``student``
    says whether the student's logits are wanted.
    """

    def __init__(
        self,
        files: Files,
        plan: Plan,
        ranks: tuple[int, int],
        variant: Variant,
        sizes: Sizes,
        *,
        device: torch.device,
        share: tuple[int, int],
        student: bool = False,
        padding: bool = False,
    ) -> None:
        self.files, self.plan, self.variant, self.sizes = files, plan, variant, sizes
        self.tp_rank, self.cp_rank = ranks
        self.device, self.share, self.student, self.padding = device, share, student, padding
        self.all: Slots = slots_of(plan.layout, self.cp_rank, plan.grid, variant, plan.lengths)
        self.window = plan.window(self.tp_rank)
        self.columns = judged_columns(self.window, plan.real, variant)
        self.order = self._order()

    def __iter__(self) -> Iterator[Tile]:
        return ahead(self._reads())

    def _routes(self) -> Ints:
        if self.plan.kind == "logits":
            return np.zeros(len(self.all.unit), np.int64)
        routes = self.plan.routes
        if self.variant.routes is not None:
            routes = np.asarray(self.variant.routes, np.int64)
        taken: Ints = routes[self.all.source_unit]
        return taken

    def _order(self) -> Ints:
        """The slots of this share that are taken, each teacher's together.

        Whole tiles are shared out, so that each is the same product whoever computes it.
        """
        routes = self._routes()
        real = np.flatnonzero((self.all.source >= 0) & (self.all.judged != self.padding))
        real = real[np.argsort(routes[real], kind="stable")]
        teachers, first = np.unique(routes[real], return_index=True)
        teacher = np.searchsorted(teachers, routes[real])
        tile = (np.arange(len(real)) - first[teacher]) // self.sizes.tile
        mine: Ints = real[(tile + teacher) % self.share[1] == self.share[0]]
        return mine

    def _reads(self) -> Iterator[Callable[[], Tile]]:
        routes = self._routes()[self.order]
        edges = np.flatnonzero(np.diff(routes)) + 1
        starts, stops = [0, *edges.tolist()], [*edges.tolist(), len(routes)]
        for start, stop in zip(starts, stops, strict=True):
            if start == stop:
                continue
            for low in range(start, stop, self.sizes.block):
                high = min(low + self.sizes.block, stop)
                yield from self._block_reads(int(routes[start]), low, high)

    def _block_reads(self, teacher: int, low: int, high: int) -> Iterator[Callable[[], Tile]]:
        step, width = self.sizes.tile, self.sizes.columns
        first = True
        for c in range(self.columns.start, self.columns.stop, width):
            columns = slice(c, min(c + width, self.columns.stop))
            for p in range(low, high, step):
                at = slice(p, min(p + step, high))
                rows = range(at.start - low, at.stop - low)
                block = slice(low, high) if first else None
                tile = Tile(teacher, rows, at, columns)
                yield partial(self._read, tile, block, p == low)
                first = False

    def _read(self, tile: Tile, block: slice | None, new_slice: bool) -> Tile:
        plan, files = self.plan, self.files
        slots = self.order[tile.at]
        shift = self.variant.column_shift
        columns = slice(tile.columns.start + shift, tile.columns.stop + shift)
        wanted = columns if plan.draft is None else plan.draft[columns]
        if plan.draft is not None and self.variant.target_shift:
            moved = plan.draft[columns] + self.variant.target_shift
            wanted = moved.clip(0, plan.vocabulary - 1)
            tile.off = torch.from_numpy(moved != wanted).to(self.device)
        if plan.kind == "logits":
            tile.logits = files.tokens(plan.payload, self.all.source[slots], wanted)
        else:
            if block is not None:
                tile.hidden = files.tokens(plan.payload, self.all.source[self.order[block]])
            if new_slice:
                head = plan.heads[tile.teacher]
                if self.variant.transposed:
                    # Square, so the whole head is small beside the slices of a vocabulary.
                    tile.head = files.head_rows(head, slice(0, plan.vocabulary)).t()[wanted]
                else:
                    tile.head = files.head_rows(head, wanted)
        unit, position = self.all.unit[slots], self.all.position[slots]
        if plan.reference is not None:
            shared = tile.columns
            if not plan.reference.gathered:
                shared = slice(shared.start, min(shared.stop, plan.reference.width))
            if shared.start < shared.stop:
                tile.reference = files.logits(
                    plan.reference, slots, unit, position, self.cp_rank, shared
                )
        if self.student and plan.student is not None:
            tile.student = files.logits(
                plan.student, slots, unit, position, self.cp_rank, tile.columns
            )
        return tile
