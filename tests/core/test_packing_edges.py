"""Packing where something is empty, single, inflated, many-dimensional or strided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.core.layout import PackedLayout
from opdtool.core.masks import draft_pieces, draft_token_mask, pack_rolled_draft_token_mask
from opdtool.core.packing import (
    gather_cp,
    pack,
    pack_input_ids,
    pack_positions,
    roll_packed_seq_dim,
    unpack,
)
from tests.reference import packing as slow

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
TWO = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12))


def features(rows: int, width: int, *more: int) -> torch.Tensor:
    """[rows, width, ...] of distinct numbers, none of them zero."""
    count = int(np.prod((rows, width, *more)))
    return torch.arange(1.0, count + 1).reshape(rows, width, *more)


@pytest.mark.parametrize("width", [6, 700], ids=["short runs", "long runs"])
@pytest.mark.parametrize("tail", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_rows_of_any_shape_are_packed_whole_on_either_path(
    width: int, tail: tuple[int, ...], grad: bool
) -> None:
    values = features(3, width, *tail)
    lengths = [width - 1, 1, width // 2]
    cu = slow.cumulative(lengths)
    cu_padded = slow.cumulative([slow.pad_length(n, 4) for n in lengths])
    layout = PackedLayout.from_cu_seqlens(cu, cu_padded, cp_size=2)
    for rank in range(2):
        packed = pack(values.requires_grad_(grad), layout, cp_rank=rank, shift=-1)
        want = slow.pack(values.detach().numpy(), cu, cu_padded, rank, 2, -1)
        assert packed.requires_grad == grad
        assert packed.shape == want.shape
        assert (packed.detach().numpy() == want).all()


def test_elements_of_sixteen_bytes_are_packed_as_any_others() -> None:
    values = torch.complex(features(2, 6), -features(2, 6)).to(torch.complex128)
    packed = pack(values, TWO)
    assert packed.dtype == torch.complex128
    want = slow.pack(values.numpy(), (0, 5, 8), (0, 8, 12))
    assert packed.tolist() == want.tolist()


@pytest.mark.parametrize("grad", [False, True])
def test_one_token_in_a_wide_pack_is_in_its_slot(grad: bool) -> None:
    layout = PackedLayout.from_cu_seqlens((0, 0, 1), (0, 2, 4))
    values = features(2, 3, 2).requires_grad_(grad)
    assert pack(values, layout).tolist() == [[0, 0], [0, 0], [7, 8], [0, 0]]


@pytest.mark.parametrize("grad", [False, True])
def test_rows_without_tokens_are_packed_to_zeros_of_their_shape(grad: bool) -> None:
    layout = PackedLayout.from_cu_seqlens((0, 0, 0), (0, 2, 4))
    packed = pack(features(2, 3, 2).requires_grad_(grad), layout)
    assert packed.tolist() == [[0, 0]] * 4


@pytest.mark.parametrize("grad", [False, True])
def test_a_pack_without_padding_is_filled_to_its_end(grad: bool) -> None:
    layout = PackedLayout.from_cu_seqlens((0, 2, 3), (0, 2, 3))
    packed = pack(features(2, 2).requires_grad_(grad), layout)
    assert packed.tolist() == [1, 2, 3]


def test_rows_of_width_zero_are_packed_to_zeros() -> None:
    assert pack(torch.ones(2, 0), TWO).tolist() == [0] * 12
    assert pack(torch.ones(2, 6, 0), TWO).shape == (12, 0)


def test_no_rows_are_packed_to_no_slots() -> None:
    packed = pack_input_ids(IDS[:0], (0,), (0,))
    assert packed.shape == (1, 0)
    assert packed.dtype == IDS.dtype


def test_segments_past_the_rows_stay_empty_whatever_their_lengths_say() -> None:
    want = [[11, 12, 0, 0, 0, 0, 0, 0]]
    assert pack_input_ids(IDS[:1], (0, 2, 4, 5), (0, 2, 6, 8)).tolist() == want
    many = pack_input_ids(IDS, (0, 2, 4, 5), (0, 2, 6, 8))
    assert many.tolist() == [[11, 12, 21, 22, 0, 0, 0, 0]]


@pytest.mark.parametrize("rows", [1, 2])
def test_an_inflated_length_past_its_padded_one_is_taken_as_the_row_width(rows: int) -> None:
    # The last length counts the bin's padding: 90 tokens in a segment of 8 slots.
    cu, cu_padded = ((0, 90), (0, 8)) if rows == 1 else ((0, 4, 94), (0, 4, 12))
    packed = pack_input_ids(IDS[-rows:], cu, cu_padded)
    last = [21, 22, 23, 24, 25, 26, 0, 0]
    assert packed.tolist() == [last if rows == 1 else [11, 12, 13, 14, *last]]


def test_a_row_wider_than_its_segment_is_refused_by_sequence() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 6 real tokens but a padded length of 5"):
        pack_input_ids(IDS, (0, 4, 94), (0, 4, 9))


@pytest.mark.parametrize("rank", [-1, 2])
def test_every_function_refuses_a_rank_that_is_none(rank: int) -> None:
    layout = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12), cp_size=2)
    calls: list[Callable[[], Any]] = [
        lambda: pack_input_ids(IDS, (0, 5, 8), (0, 8, 12), rank, 2),
        lambda: pack(IDS, layout, cp_rank=rank),
        lambda: pack_positions(layout, cp_rank=rank),
        lambda: draft_token_mask(IDS, layout, cp_rank=rank),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"cp_rank is {rank}, outside 0..1"):
            call()


def test_rank_0_and_no_shift_are_what_is_meant_when_nothing_is_said() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12), cp_size=2)
    assert pack(IDS, layout).tolist() == [11, 12, 0, 0, 21, 0]
    assert pack_positions(layout).tolist() == [0, 1, 6, 7, 0, 3]
    assert draft_token_mask(IDS, layout).tolist() == [12, 13, 0, 0, 22, 0]
    assert draft_pieces(layout).position.tolist() == [1, 1]
    assert pack_input_ids(IDS, (0, 5, 8), (0, 8, 12)).shape == (1, 12)


def test_the_first_dimension_can_be_named_from_the_end() -> None:
    values = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert roll_packed_seq_dim(values, (0, 2, 3), -2).tolist() == [[3, 4], [0, 0], [0, 0]]
    for missing in (-3, 2):
        with pytest.raises(ValueError, match=rf"seq_dim {missing} is no dimension of .*\[3, 2\]"):
            roll_packed_seq_dim(values, (0, 2, 3), missing)


def test_empty_segments_at_either_end_and_empty_packs_roll() -> None:
    values = torch.tensor([1, 2, 3])
    assert roll_packed_seq_dim(values, (0, 0, 2, 3, 3), 0).tolist() == [2, 0, 0]
    assert roll_packed_seq_dim(torch.ones(2, 0), (0, 0), 1).shape == (2, 0)
    assert roll_packed_seq_dim(torch.ones(0), (0,), 0).shape == (0,)


def test_a_pack_is_unpacked_with_all_its_dimensions_and_empty_rows_stay_zero() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 2, 2, 3), (0, 3, 4, 6), sequence_index=(3, 0, 1))
    packed = features(6, 1, 2).reshape(6, 2)
    rows = unpack(packed, layout, rows=4, width=2)
    assert rows.shape == (4, 2, 2)
    assert rows.tolist() == [
        [[0, 0], [0, 0]],
        [[9, 10], [0, 0]],
        [[0, 0], [0, 0]],
        [[1, 2], [3, 4]],
    ]
    assert unpack(packed[:0], layout.part(0, 0), rows=1, width=1).tolist() == [[[0, 0]]]


@pytest.mark.parametrize("row", [-1, 2, 7])
def test_a_row_outside_the_batch_is_named_when_unpacking(row: int) -> None:
    layout = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12), sequence_index=(1, row))
    with pytest.raises(ValueError, match=f"sequence_index names row {row}, outside the 2 rows"):
        unpack(torch.ones(12), layout, rows=2, width=6)


def test_the_longest_sequence_is_named_when_it_is_wider_than_the_batch() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 3, 8), (0, 4, 12))
    with pytest.raises(ValueError, match="sequence 1 has 5 tokens, more than the row width 4"):
        unpack(torch.ones(12), layout, rows=2, width=4)
    assert unpack(torch.ones(12), layout, rows=2, width=5).sum() == 8


def test_shards_of_any_shape_are_gathered_in_the_order_of_the_pack() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 12), cp_size=2)
    whole = features(12, 2)
    shards = [whole[layout.global_slots(rank)] for rank in range(2)]
    assert not torch.equal(torch.cat(shards), whole)
    assert torch.equal(gather_cp(shards, layout), whole)


def test_one_shard_is_the_pack_itself_and_not_a_copy() -> None:
    shard = torch.ones(12)
    assert gather_cp([shard], TWO) is shard


def test_the_packed_mask_keeps_weights_of_a_row_of_one_token_out() -> None:
    mask = pack_rolled_draft_token_mask(torch.ones(2, 3), torch.ones(2), (0, 1, 4), (0, 2, 5))
    assert mask.tolist() == [[0, 0, 1, 1, 0]]


def test_many_short_runs_are_gathered_block_by_block() -> None:
    lengths = [30 + n % 25 for n in range(900)]
    cu = slow.cumulative(lengths)
    cu_padded = slow.cumulative([slow.pad_length(n, 4) for n in lengths])
    assert cu[-1] > 1 << 15  # more than are gathered at a time
    values = features(900, 60).to(torch.int32)
    for place in ((0, 1), (1, 2)):  # two blocks, and one
        packed = pack_input_ids(values, cu, cu_padded, *place, -1)
        want = slow.pack(values.numpy(), cu, cu_padded, *place, -1)
        assert packed[0].tolist() == want.tolist()


def test_a_single_wide_token_is_packed_whole() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 1), (0, 2))
    packed = pack(features(1, 1, 100), layout)
    assert packed.tolist() == [features(100, 1).flatten().tolist(), [0] * 100]
