"""How much is taken at a time, the buffers it is kept in, and reading ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from opdtool.core.rebuild import Variant
from opdtool.jobs.reconstruct.plan import Plan

T = TypeVar("T")
LONGEST = 1e18
"""Of a row, for the bound: a product of two is still a finite float32."""
MOST_COLUMNS, MOST_POSITIONS = 8192, 1024
LEAST_COLUMNS, LEAST_POSITIONS = 64, 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is taken at a time."""

    block: int
    tile: int
    columns: int


def sizes_for(plan: Plan) -> Sizes:
    """The largest tiles and blocks whose buffers fit in the plan's memory.

    The matrix library packs operands beside our own buffers, so a part is left to it.
    """
    compute = plan.compute.itemsize
    wide = 4 if is_wide(plan) or compute != 2 else 0
    recorded = sum(
        2 * side.dtype.itemsize + 4 for side in (plan.reference, plan.student) if side is not None
    )
    budget = plan.budget * 3 // 5
    columns, tile = MOST_COLUMNS, MOST_POSITIONS

    def fixed() -> int:
        stored = max([head.weight.dtype.itemsize for head in plan.heads.values()], default=0)
        slices = columns * plan.width * (2 * stored + 2 * compute + 2 * wide)
        rows = tile * plan.width * (4 + compute)
        return slices + rows + tile * columns * (4 + 2 * compute + recorded)

    while fixed() > budget // 2 and (columns > LEAST_COLUMNS or tile > LEAST_POSITIONS):
        if columns > LEAST_COLUMNS and (columns >= 4 * tile or tile <= LEAST_POSITIONS):
            columns //= 2
        else:
            tile //= 2
    per_position = max(plan.width, 1) * (plan.payload.dtype.itemsize + compute + 4)
    block = max(tile, (budget - min(fixed(), budget)) // per_position // tile * tile)
    return Sizes(block=block, tile=tile, columns=columns)


def is_wide(plan: Plan) -> bool:
    """Whether products are kept in float32 instead of being rounded to the head's dtype.

    It costs about twice the time in bfloat16. A comparison with a reference needs it, and so does
    what comes behind the product: rounded in between, a fifth to a quarter of the bfloat16 logits
    that are written would be another number behind a scale or a softcap (measured at H 2048), off
    by a fifth to a third more at the mean; and what is written would not be what a comparison
    rebuilds, so that the tool's own output would not equal itself at a tolerance of zero.
    """
    return plan.reference is not None or plan.scale is not None or plan.softcap is not None


class Room:
    """Buffers kept from tile to tile: a fresh one costs the faulting-in of its pages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = int(np.prod(shape))
        flat = self._flat.get((name, dtype))
        if flat is None or len(flat) < size:
            self._flat.pop((name, dtype), None)
            flat = torch.empty(size, dtype=dtype, device=self._device)
            self._flat[name, dtype] = flat
        return flat[:size].view(shape)


def judged_columns(window: slice, real: int, variant: Variant) -> slice:
    """The columns of a window that hold logits, less those that a shift moves off the edge."""
    low = max(window.start, -variant.column_shift)
    high = min(window.stop, real, real - variant.column_shift, variant.columns or real)
    return slice(min(low, high), high) if high > low else slice(window.start, window.start)


NORM_ELEMENTS = 1 << 17
"""Elements whose norms are taken at a time: few enough to stay in a core's cache."""


def norms_of(rows: Tensor, *, fours: bool) -> tuple[Tensor, Tensor | None]:
    """The 2-norms of rows, float32, and the 4-norms where they are asked for."""
    step = max(1, NORM_ELEMENTS // max(rows.shape[1], 1))
    twos = torch.empty(len(rows), device=rows.device)
    found = torch.empty(len(rows), device=rows.device) if fours else None
    for low in range(0, len(rows), step):
        some = slice(low, low + step)
        wide = rows[some].float()
        twos[some] = torch.linalg.vector_norm(wide, dim=-1)
        if found is not None:
            found[some] = torch.linalg.vector_norm(wide.square(), dim=-1).sqrt_()
    for norms in (twos, found):
        if norms is not None:  # what is not finite allows no error, and hides none
            norms.nan_to_num_(0.0, posinf=LONGEST).clamp_max_(LONGEST)
    return twos, found


def ahead(jobs: Iterator[Callable[[], T]]) -> Iterator[T]:
    """The results of jobs in order, the next one run in a thread meanwhile."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="opdtool-read") as pool:
        waiting = None
        for job in jobs:
            coming = pool.submit(job)
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()
