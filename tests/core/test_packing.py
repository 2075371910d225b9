"""pack, roll, unpack and gather against hand-worked arrays and a slow reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import cp_window
from opdtool.core.packing import (
    gather_cp,
    pack,
    pack_input_ids,
    pack_positions,
    roll_packed_seq_dim,
    unpack,
)
from tests.reference import packing as slow

IDS = torch.tensor([[11, 12, 13, 14, 15, 0], [21, 22, 23, 0, 0, 0]])


def test_a_pack_holds_every_row_then_zeros_to_its_padded_length() -> None:
    packed = pack_input_ids(IDS, (0, 5, 8), (0, 8, 12))
    assert packed.tolist() == [[11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 23, 0]]


def test_a_roll_of_minus_one_is_circular_inside_the_padded_segment() -> None:
    packed = pack_input_ids(IDS, (0, 5, 8), (0, 8, 12), roll_shift=-1)
    assert packed.tolist() == [[12, 13, 14, 15, 0, 0, 0, 11, 22, 23, 0, 21]]


def test_rank_r_owns_chunk_r_and_the_mirrored_chunk() -> None:
    rank0 = pack_input_ids(IDS, (0, 5, 8), (0, 8, 16), 0, 2)
    rank1 = pack_input_ids(IDS, (0, 5, 8), (0, 8, 16), 1, 2)
    assert rank0.tolist() == [[11, 12, 0, 0, 21, 22, 0, 0]]
    assert rank1.tolist() == [[13, 14, 15, 0, 23, 0, 0, 0]]


def test_the_roll_comes_before_the_window() -> None:
    rank1 = pack_input_ids(IDS, (0, 5, 8), (0, 8, 16), 1, 2, -1)
    assert rank1.tolist() == [[14, 15, 0, 0, 0, 0, 0, 0]]


def test_an_inflated_last_length_is_clamped_to_the_row_width() -> None:
    packed = pack_input_ids(IDS[:, :3], (0, 3, 16), (0, 4, 20))
    assert packed.tolist() == [[11, 12, 13, 0, 21, 22, 23] + [0] * 13]


def test_segments_past_the_batch_are_empty() -> None:
    assert pack_input_ids(IDS[:1], (0, 2, 4), (0, 2, 6)).tolist() == [[11, 12, 0, 0, 0, 0]]


def test_tensor_offsets_give_what_tuples_give() -> None:
    tensors = pack_input_ids(IDS, torch.tensor([0, 5, 8]), torch.tensor([0, 8, 12]).int())
    assert torch.equal(tensors, pack_input_ids(IDS, (0, 5, 8), (0, 8, 12)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pack_input_ids(IDS, (0, 5, 8), (0, 8, 14), 0, 2), r"sequence 1 .* 6.* 4 \(2 x"),
        (lambda: pack_input_ids(IDS, (0, 5, 8), (0, 4, 8)), r"sequence 0 has 5 real .* of 4"),
        (lambda: pack_input_ids(IDS, (0, 5), (0, 8)), r"1 sequence but the batch has 2 rows"),
        (lambda: pack_input_ids(IDS, (0, 5, 8), (0, 8)), r"3 entries and cu_seqlens_padded 2"),
        (lambda: pack_input_ids(IDS, (1, 5, 8), (0, 8, 12)), r"cu_seqlens starts at 1"),
        (lambda: pack_input_ids(IDS, (0, 5, 3), (0, 8, 12)), r"falls from 5 to 3 at entry 2"),
        (lambda: pack_input_ids(IDS, (0, 5, 8), (0, 8, 16), 2, 2), r"cp_rank is 2, outside 0..1"),
        (lambda: pack_input_ids(IDS, (0, 5, 8), (0, 8, 16), 0, 0), r"cp_size is 0"),
        (lambda: pack_input_ids(IDS[0], (0, 5), (0, 8)), r"shape \[6\]; expected \[B,S\]"),
        (lambda: roll_packed_seq_dim(torch.ones(5), (0, 3), 0), r"5 slots .* ends at 3"),
        (lambda: roll_packed_seq_dim(torch.ones(3), (0, 3), 1), r"seq_dim 1"),
        (lambda: roll_packed_seq_dim(torch.ones(3), (0, 4, 3), 0), r"falls from 4 to 3"),
    ],
)
def test_what_would_lose_tokens_is_refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_a_roll_moves_left_inside_each_segment_and_zeroes_its_last_slot() -> None:
    values = torch.tensor([[1, 2, 3, 4, 5]])
    assert roll_packed_seq_dim(values, (0, 3, 5), 1).tolist() == [[2, 3, 0, 5, 0]]
    assert roll_packed_seq_dim(values, (0, 3, 3, 5), -1).tolist() == [[2, 3, 0, 5, 0]]
    assert roll_packed_seq_dim(values.T, (0, 3, 5), 0).T.tolist() == [[2, 3, 0, 5, 0]]
    assert values.tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("long", [False, True], ids=["gathered", "copied"])
def test_every_dtype_is_moved_bit_for_bit(dtype: torch.dtype, long: bool) -> None:
    width = 1500 if long else 6
    values = torch.randint(0, 2, (3, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    lengths = [width - 1, 1, width // 2]
    cu = slow.cumulative(lengths)
    cu_padded = slow.cumulative([slow.pad_length(n, 4) for n in lengths])
    for rank in range(2):
        packed = pack_input_ids(values, cu, cu_padded, rank, 2, -1)
        assert packed.dtype == dtype
        want = slow.pack(values.to(torch.float64).numpy(), cu, cu_padded, rank, 2, -1)
        assert want.any()
        assert packed[0].to(torch.float64).numpy().tolist() == want.tolist()


def test_gradients_flow_through_pack_and_roll() -> None:
    values = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)

    def both(x: torch.Tensor) -> torch.Tensor:
        packed = pack(x, PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12)))
        return roll_packed_seq_dim(packed, (0, 8, 12), 0)

    assert torch.autograd.gradcheck(both, values)


def test_a_strided_view_packs_like_its_copy() -> None:
    wide = torch.arange(48).reshape(2, 4, 6).transpose(1, 2)
    assert not wide.is_contiguous()
    layout = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12))
    want = slow.pack(wide.numpy(), (0, 5, 8), (0, 8, 12))
    assert pack(wide, layout).tolist() == want.tolist()


def test_positions_restart_in_each_segment_and_run_on_through_padding() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 16), cp_size=2)
    assert pack_positions(layout, cp_rank=0).tolist() == [0, 1, 6, 7, 0, 1, 6, 7]
    assert pack_positions(layout, cp_rank=1).tolist() == [2, 3, 4, 5, 2, 3, 4, 5]
    assert pack_positions(layout, cp_rank=1, start=3, stop=6).tolist() == [5, 2, 3]


def test_cp_window_is_the_zigzag_one() -> None:
    assert cp_window(8, 0, 2) == (slice(0, 2), slice(6, 8))
    assert cp_window(8, 1, 2) == (slice(2, 4), slice(4, 6))
    assert cp_window(5, 0, 1) == (slice(0, 5), slice(5, 5))
    with pytest.raises(ValueError, match="multiple of 4"):
        cp_window(6, 0, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda layout: unpack(torch.ones(7), layout, rows=2, width=6), "7 slots .* at 12"),
        (lambda layout: unpack(torch.ones(12), layout, rows=1, width=6), "names row 1"),
        (lambda layout: unpack(torch.ones(12), layout, rows=2, width=4), "more than .* 4"),
        (lambda layout: gather_cp([torch.ones(12)] * 2, layout), "2 shards for cp_size 1"),
        (lambda layout: gather_cp([torch.ones(6)], layout), "has 6 slots; expected 12"),
        (lambda layout: pack(torch.ones(2), layout), r"shape \[2\]"),
    ],
)
def test_unpack_and_gather_refuse_what_does_not_belong(
    call: Callable[[PackedLayout], Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        call(PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12)))


def test_owners_and_places_agree_with_a_slow_walk() -> None:
    layout = PackGeometry(cp_size=3, tail="segment", pad_packed_multiple=5).layout([7, 1, 13])
    seen = 0
    for rank in range(3):
        slots = layout.global_slots(rank)
        ranks, local = layout.owners(slots)
        assert ranks.tolist() == [rank] * len(slots)
        assert local.tolist() == list(range(len(slots)))
        seen += len(slots)
    assert seen == layout.total > 0
    padded = np.diff(layout.cu_seqlens_padded).tolist()
    walk = [(s, p) for s, width in enumerate(padded) for p in range(width)]
    for slot, (segment, position) in enumerate(walk):
        place = layout.locate(slot)
        assert (place["position"], place["slot"]) == (position, slot)
        assert place.get("sequence") == (segment if segment < 3 else None)
        window = slow.zigzag_positions(padded[segment], place["cp_rank"], 3)
        assert position in window
