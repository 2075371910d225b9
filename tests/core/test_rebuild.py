"""Which token fills which slot, rightly and as the context-parallel faults would have it."""

from __future__ import annotations

import numpy as np
import pytest

from opdtool.core.layout import PackedLayout
from opdtool.core.rebuild import Slots, TokenGrid, Variant, slots_of


def layout(offsets: list[int], cp: int) -> PackedLayout:
    return PackedLayout.from_cu_seqlens(offsets, offsets, cp_size=cp)


def sources(cp_rank: int, variant: Variant, *, offsets: list[int], cp: int) -> list[int]:
    grid = TokenGrid(width=offsets[-1], offsets=np.asarray(offsets))
    return list(slots_of(layout(offsets, cp), cp_rank, grid, variant).source)


def batch(cp_rank: int, variant: Variant = Variant()) -> Slots:  # noqa: B008
    """Two rows of 6 tokens in 8 padded slots, CP 2."""
    return slots_of(layout([0, 8, 16], 2), cp_rank, TokenGrid(width=6), variant)


def test_slots_of_a_batch_are_the_tokens_of_its_windows() -> None:
    # Row 1 begins at flat token 6; slots 6 and 7 of a row are padding.
    assert batch(0).source.tolist() == [0, 1, -1, -1, 6, 7, -1, -1]
    assert batch(1).source.tolist() == [2, 3, 4, 5, 8, 9, 10, 11]
    assert batch(1).position.tolist() == [2, 3, 4, 5] * 2
    assert batch(1).unit.tolist() == [0] * 4 + [1] * 4


def test_a_shift_never_crosses_a_row_nor_fills_padding() -> None:
    assert batch(1, Variant(position_shift=1)).source.tolist() == [3, 4, 5, -1, 9, 10, 11, -1]
    assert batch(0, Variant(position_shift=-1)).source.tolist() == [-1, 0, -1, -1, -1, 6, -1, -1]


@pytest.mark.parametrize(
    ("variant", "rank0", "rank1"),
    [
        (Variant(), [0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]),
        (Variant(cp_order=(1, 0)), [1, 2, 6, 7, 8, 9], [0, 3, 4, 5, 10, 11]),
        (Variant(arrangement="contiguous"), [0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]),
        (Variant(arrangement="pack-zigzag"), [0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]),
        (Variant(arrangement="pack-contiguous"), [0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]),
    ],
)
def test_a_pack_of_two_segments_dealt_out_in_every_way(
    variant: Variant, rank0: list[int], rank1: list[int]
) -> None:
    for rank, want in enumerate((rank0, rank1)):
        assert sources(rank, variant, offsets=[0, 4, 12], cp=2) == want


def test_tokens_past_the_payload_are_none() -> None:
    grid = TokenGrid(width=10, offsets=np.asarray([0, 4, 12]))
    assert grid.flat(np.asarray([1, 1, 0]), np.asarray([5, 6, 4])).tolist() == [9, -1, -1]
