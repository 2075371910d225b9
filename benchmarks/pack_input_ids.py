"""Packing token ids in memory, beside a loop that packs row by row with torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Row, best_each, main
from opdtool.loss_utils import _pack_input_ids

CP_SIZE = 2
ROLL = -1
SHAPES = {
    "small": ((1024, 256, None), (8, 4096, None)),
    "middle": ((8192, 256, 15.0), (64, 4096, 3.0)),
    "large": ((65536, 256, None), (1024, 4096, None)),
}
"""(rows, width, how many times as fast as the loop was promised)."""


def plain_pack(
    input_ids: Tensor,
    cu_seqlens: tuple[int, ...],
    cu_seqlens_padded: tuple[int, ...],
    cp_rank: int,
    cp_size: int,
    roll_shift: int,
) -> Tensor:
    """The packed ids [1, T / cp_size] of one rank, row by row as one would first write it."""
    out = input_ids.new_zeros(1, cu_seqlens_padded[-1] // cp_size)
    for b, row in enumerate(input_ids):
        padded = cu_seqlens_padded[b + 1] - cu_seqlens_padded[b]
        real = min(cu_seqlens[b + 1] - cu_seqlens[b], input_ids.shape[1])
        segment = input_ids.new_zeros(padded)
        segment[:real] = row[:real]
        segment = torch.roll(segment, roll_shift)
        pieces = segment.chunk(2 * cp_size)
        begin = cu_seqlens_padded[b] // cp_size
        out[0, begin : begin + padded // cp_size] = torch.cat(
            [pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]]
        )
    return out


def uneven_batch(rows: int, width: int) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Ids [rows, width] and cumulative lengths, real and padded to 2 x CP: log-normal lengths
    around a third of the width, the longest cut at it."""
    generator = np.random.default_rng(0)
    draw = np.exp(generator.normal(np.log(width / 3), 0.8, rows))
    lengths = np.clip(draw.astype(np.int64), 1, width)
    padded = -(-lengths // (2 * CP_SIZE)) * (2 * CP_SIZE)
    ids = torch.from_numpy(generator.integers(1, 150_000, (rows, width)))
    real, physical = (
        tuple(int(x) for x in np.concatenate([[0], np.cumsum(each)])) for each in (lengths, padded)
    )
    return ids, real, physical


def rows(scale: str) -> list[Row]:
    """Both shapes of the scale, one rank of a context-parallel pair, rolled by -1."""
    out = []
    for count, width, promised in SHAPES[scale]:
        ids, real, padded = uneven_batch(count, width)
        arguments = (ids, real, padded, 0, CP_SIZE, ROLL)
        assert torch.equal(_pack_input_ids(*arguments), plain_pack(*arguments))
        ours, plain = best_each(
            [lambda a=arguments: _pack_input_ids(*a), lambda a=arguments: plain_pack(*a)],  # type: ignore[misc]
            repeats=5,
        )
        out.append(
            Row(
                name=f"_pack_input_ids, width {width}, CP 2, roll -1",
                size=f"{count:,} x {width:,}",
                ours=ours,
                plain=plain,
                ratio=plain / ours,
                goal=f">= {promised:g} x" if promised else "",
                reached=plain / ours >= promised if promised else None,
                work=padded[-1],
            )
        )
    return out


if __name__ == "__main__":
    main(rows, __doc__)
