"""PackedLayout and PackGeometry against hand-worked arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from opdtool.core.geometry import FP8_MULTIPLES, PackGeometry
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Ints
from tests.reference import packing as slow


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def three(cp_size: int = 1) -> PackedLayout:
    """Lengths 5, 3, 1 padded to 8, 4, 12; rows 2, 0, 1 of a batch."""
    return PackedLayout.from_cu_seqlens(
        (0, 5, 8, 9), (0, 8, 12, 24), cp_size=cp_size, sequence_index=(2, 0, 1)
    )


def test_a_layout_counts_its_tokens_slots_segments_and_rows() -> None:
    layout = three(cp_size=2)
    assert layout.lengths.tolist() == [5, 3, 1]
    assert layout.padded_lengths.tolist() == [8, 4, 12]
    assert (layout.num_segments, layout.num_rows) == (3, 3)
    assert (layout.total, layout.local_total, layout.real_tokens) == (24, 12, 9)
    assert [layout.local_start(n) for n in range(3)] == [0, 4, 6]
    assert [layout.row_of(n) for n in range(3)] == [2, 0, 1]


def test_without_a_size_and_an_index_there_is_one_rank_and_rows_are_in_order() -> None:
    layout = PackedLayout(
        cu_seqlens=ints(0, 2), cu_seqlens_padded=ints(0, 3), sequence_index=ints(0)
    )
    assert layout.cp_size == 1
    assert layout.local_total == 3
    assert PackedLayout.from_cu_seqlens((0, 1, 2), (0, 1, 2)).sequence_index.tolist() == [0, 1]
    empty = PackedLayout.from_cu_seqlens((0,), (0,))
    assert (empty.num_segments, empty.num_rows, empty.total, empty.real_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cp_size": 0}, "cp_size is 0; it must be at least 1"),
        ({"cp_size": -1}, "cp_size is -1"),
        ({"sequence_index": ints(0, 1, 2)}, "sequence_index has 3 entries for 2 segments"),
        ({"cu_seqlens": ints(0, 5, 4)}, "cu_seqlens falls from 5 to 4 at entry 2"),
        ({"cu_seqlens": ints(0, -5, 4)}, "cu_seqlens falls from 0 to -5 at entry 1"),
        ({"cu_seqlens": ints(2, 5, 6)}, "cu_seqlens starts at 2"),
        ({"cu_seqlens_padded": ints(0, 9, 8)}, "cu_seqlens_padded falls from 9 to 8 at entry 2"),
        ({"cu_seqlens": ints(0, 5)}, "cu_seqlens has 2 entries and cu_seqlens_padded 3"),
        ({"cu_seqlens": ints()}, r"cu_seqlens has shape \[0\]; expected \[N\+1\]"),
        ({"cu_seqlens": ints(0, 5, 8)[None]}, r"cu_seqlens has shape \[1, 3\]"),
        ({"cu_seqlens": ints(0, 5, 10)}, "sequence 1 has 5 real tokens but a padded length of 4"),
        ({"cp_size": 3}, r"sequence 0 has a padded length of 8, .* multiple of 6 \(2 x cp_size 3"),
    ],
)
def test_offsets_that_are_no_layout_are_refused(change: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {
        "cu_seqlens": ints(0, 5, 8),
        "cu_seqlens_padded": ints(0, 8, 12),
        "cp_size": 2,
        "sequence_index": ints(0, 1),
    }
    assert PackedLayout(**right).total == 12
    with pytest.raises(ValueError, match=says):
        PackedLayout(**(right | change))


def test_a_full_segment_is_no_longer_than_itself() -> None:
    assert PackedLayout.from_cu_seqlens((0, 4), (0, 4), cp_size=2).lengths.tolist() == [4]


def test_a_part_is_the_layout_of_its_segments_alone() -> None:
    part = three(cp_size=2).part(1, 3)
    assert part.cu_seqlens.tolist() == [0, 3, 4]
    assert part.cu_seqlens_padded.tolist() == [0, 4, 16]
    assert part.sequence_index.tolist() == [0, 1]
    assert part.cp_size == 2
    assert three().part(0, 1).cu_seqlens_padded.tolist() == [0, 8]
    assert three().part(1, 2).sequence_index.tolist() == [0]
    with_tail = PackedLayout.from_cu_seqlens((0, 1, 1), (0, 2, 4), sequence_index=(0,))
    assert with_tail.part(1, 2).num_rows == 0


def test_the_same_pack_is_cut_for_another_size() -> None:
    layout = three().with_cp(2)
    assert layout.cp_size == 2
    assert layout.cu_seqlens.tolist() == [0, 5, 8, 9]
    assert layout.cu_seqlens_padded.tolist() == [0, 8, 12, 24]
    assert layout.sequence_index.tolist() == [2, 0, 1]


def test_pieces_are_the_runs_that_a_rank_is_filled_from() -> None:
    # Segment 0: a b c d e . . . in chunks of 2; rank 0 holds a b | . ., rank 1 c d | e .
    zero, one = three(cp_size=2).pieces(), three(cp_size=2).pieces(1)
    assert zero.dst.tolist() == [0, 4, 6]
    assert zero.segment.tolist() == [0, 1, 2]
    assert zero.position.tolist() == [0, 0, 0]
    assert zero.count.tolist() == [2, 1, 1]
    assert one.dst.tolist() == [0, 2, 4, 5]
    assert one.segment.tolist() == [0, 0, 1, 1]
    assert one.position.tolist() == [2, 4, 1, 2]
    assert one.count.tolist() == [2, 1, 1, 1]


def test_pieces_of_a_rolled_segment_come_back_on_the_other_side() -> None:
    # a b c . rolled left: b c . a;  rolled right twice: c . a b
    layout = PackedLayout.from_cu_seqlens((0, 3), (0, 4))
    left, right = layout.pieces(shift=-1), layout.pieces(shift=2)
    assert (left.dst.tolist(), left.position.tolist(), left.count.tolist()) == (
        [0, 3],
        [1, 0],
        [2, 1],
    )
    assert (right.dst.tolist(), right.position.tolist(), right.count.tolist()) == (
        [0, 2],
        [2, 0],
        [1, 2],
    )


def test_a_limit_caps_every_length() -> None:
    assert three().pieces(limit=2).count.tolist() == [2, 2, 1]
    assert three().pieces(limit=9).count.tolist() == [5, 3, 1]
    assert three().pieces().count.tolist() == [5, 3, 1]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_rank_that_is_none_is_refused_by_every_question(cp_size: int) -> None:
    layout = three(cp_size)
    for rank in (-1, cp_size):
        for question in (layout.pieces, layout.global_slots, layout.local_positions):
            with pytest.raises(ValueError, match=f"cp_rank is {rank}, outside"):
                question(rank)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(
    "padded", [(8, 4, 12), (4,), (0, 4, 0, 0, 8, 0), (4, 0), (0, 0), ()], ids=str
)
def test_every_span_of_local_slots_is_that_part_of_the_whole(
    cp_size: int, padded: tuple[int, ...]
) -> None:
    offsets = slow.cumulative(list(padded))
    layout = PackedLayout.from_cu_seqlens([0] * len(offsets), offsets, cp_size=cp_size)
    for rank in range(cp_size):
        places = [
            (begin + p, p)
            for begin, width in zip(offsets[:-1], padded, strict=True)
            for p in slow.zigzag_positions(width, rank, cp_size)
        ]
        assert len(places) == layout.local_total == sum(padded) // cp_size
        assert layout.global_slots(rank).tolist() == [slot for slot, _ in places]
        assert layout.local_positions(rank).tolist() == [p for _, p in places]
        for start in range(len(places) + 1):
            for stop in range(start, len(places) + 1):
                slots = layout.global_slots(rank, start, stop)
                assert slots.tolist() == [slot for slot, _ in places[start:stop]]
                assert slots.dtype == torch.int64
                positions = layout.local_positions(rank, start, stop)
                assert positions.tolist() == [p for _, p in places[start:stop]]


def test_owners_of_slots_in_any_order_are_rank_and_local_slot() -> None:
    # Segment 2 has chunks of 3 from slot 12 on; its local slots begin at 6.
    rank, local = three(cp_size=2).owners(torch.tensor([23, 0, 2, 7, 15, 11, 20]))
    assert rank.tolist() == [0, 0, 1, 0, 1, 0, 1]
    assert local.tolist() == [11, 0, 0, 3, 6, 5, 11]
    # Four ranks, chunks of 3: ranks 0 1 2 3 3 2 1 0, the second chunk behind the first.
    four = PackedLayout.from_cu_seqlens((0, 9), (0, 24), cp_size=4)
    rank, local = four.owners(torch.tensor([5, 9, 12, 20, 23]))
    assert rank.tolist() == [1, 3, 3, 1, 0]
    assert local.tolist() == [2, 0, 3, 5, 5]
    odd = PackedLayout.from_cu_seqlens((0, 2), (0, 3))
    assert [one.tolist() for one in odd.owners(torch.arange(3))] == [[0, 0, 0], [0, 1, 2]]
    rank, local = three().owners(torch.tensor([23, 0]))
    assert rank.tolist() == [0, 0]
    assert local.tolist() == [23, 0]


def test_places_name_segment_position_and_whether_a_token_is_there() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 2, 2, 3), (0, 2, 2, 4))
    segment, position = layout.positions_of(torch.tensor([0, 1, 2, 3]))
    assert segment.tolist() == [0, 0, 2, 2]  # the empty segment 1 holds no slot
    assert position.tolist() == [0, 1, 0, 1]
    assert layout.segments_of(torch.tensor([3, 0])).tolist() == [2, 0]
    assert layout.is_real(segment, position).tolist() == [True, True, True, False]
    assert layout.is_real(segment, torch.tensor([-1, 2, 0, 1])).tolist() == [0, 0, 1, 0]


def test_a_place_for_a_report_names_the_row_and_the_segment_where_they_differ() -> None:
    layout = PackedLayout.from_cu_seqlens(
        (0, 5, 8, 8), (0, 8, 12, 16), cp_size=2, sequence_index=(0, 5)
    )
    assert layout.locate(3) == {"sequence": 0, "position": 3, "slot": 3, "cp_rank": 1}
    assert layout.locate(8) == {
        "sequence": 5,
        "segment": 1,
        "position": 0,
        "slot": 8,
        "cp_rank": 0,
    }
    assert layout.locate(13) == {"segment": 2, "position": 1, "slot": 13, "cp_rank": 1}
    assert layout.row_of(2) is None


def test_the_fp8_recipes_want_their_multiples_per_rank() -> None:
    assert FP8_MULTIPLES == {"none": 1, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


@pytest.mark.parametrize(
    ("options", "base", "sequence", "total"),
    [
        ({}, 1, 1, 1),
        ({"tp_size": 4}, 1, 1, 1),
        ({"sequence_parallel": True}, 1, 1, 1),
        ({"tp_size": 4, "sequence_parallel": True}, 4, 4, 4),
        ({"cp_size": 2}, 4, 4, 4),
        ({"cp_size": 3, "tp_size": 4, "sequence_parallel": True}, 24, 24, 24),
        ({"cp_size": 2, "pad_multiple": 12}, 4, 12, 4),
        ({"cp_size": 2, "fp8": "tensorwise"}, 4, 4, 64),
        ({"fp8": "tensorwise", "pad_packed_multiple": 24}, 1, 1, 48),
        ({"pad_packed_multiple": 7}, 1, 1, 7),
    ],
)
def test_the_multiples_follow_from_the_geometry(
    options: dict[str, Any], base: int, sequence: int, total: int
) -> None:
    geometry = PackGeometry(**options)
    assert geometry.base_multiple == base
    assert geometry.sequence_multiple == sequence
    assert geometry.total_multiple == total


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cp_size": 0}, "cp_size is 0; it must be at least 1"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"pad_multiple": 0}, "pad_multiple is 0"),
        ({"pad_packed_multiple": -4}, "pad_packed_multiple is -4"),
        ({"pad_packed_to": 0}, "pad_packed_to is 0"),
        ({"fp8": "int4"}, "fp8 is 'int4'; it is one of none, tensorwise, mxfp8, blockwise"),
        ({"tail": "drop"}, "tail is 'drop'; it is absorb or segment"),
        (
            {"cp_size": 2, "pad_multiple": 6},
            "pad multiple 6 is not a multiple of 4, .* CP 2, TP 1 and sequence parallelism off",
        ),
        (
            {"tp_size": 2, "sequence_parallel": True, "pad_packed_to": 9},
            "pad-packed-to 9 is not a multiple of 2, .* TP 2 and sequence parallelism on",
        ),
    ],
)
def test_a_geometry_that_is_none_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PackGeometry(**options)


def test_lengths_and_totals_are_rounded_up() -> None:
    geometry = PackGeometry(cp_size=2, fp8="tensorwise")
    assert geometry.padded(ints(0, 1, 4, 5)).tolist() == [0, 4, 4, 8]
    assert [geometry.padded_total(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    fixed = PackGeometry(pad_packed_to=10)
    assert [fixed.padded_total(n) for n in (0, 10)] == [10, 10]
    with pytest.raises(ValueError, match="11 padded slots, more than pad-packed-to 10"):
        fixed.padded_total(11)


def test_a_tail_joins_the_last_segment_or_is_one_of_its_own() -> None:
    absorbed = PackGeometry(pad_packed_multiple=8).layout([3, 2])
    assert absorbed.cu_seqlens.tolist() == [0, 3, 5]
    assert absorbed.cu_seqlens_padded.tolist() == [0, 3, 8]
    apart = PackGeometry(pad_packed_multiple=8, tail="segment").layout([3, 2])
    assert apart.cu_seqlens.tolist() == [0, 3, 5, 5]
    assert apart.cu_seqlens_padded.tolist() == [0, 3, 5, 8]
    assert apart.sequence_index.tolist() == [0, 1]
    assert apart.num_rows == 2
    even = PackGeometry(pad_packed_multiple=5, tail="segment").layout([3, 2])
    assert even.cu_seqlens_padded.tolist() == [0, 3, 5]


@pytest.mark.parametrize("tail", ["absorb", "segment"])
def test_a_pack_of_no_sequences_is_its_tail_alone(tail: Any) -> None:
    layout = PackGeometry(pad_packed_to=4, tail=tail).layout([])
    assert layout.cu_seqlens_padded.tolist() == [0, 4]
    assert (layout.num_rows, layout.real_tokens) == (0, 0)
    assert PackGeometry().layout([]).total == 0


def test_a_layout_remembers_size_and_rows_and_refuses_negative_lengths() -> None:
    layout = PackGeometry(cp_size=2).layout([3, 5], sequence_index=(7, 4))
    assert layout.cp_size == 2
    assert layout.sequence_index.tolist() == [7, 4]
    assert layout.padded_lengths.tolist() == [4, 8]
    assert PackGeometry().layout([0, 2]).lengths.tolist() == [0, 2]
    with pytest.raises(ValueError, match="length 1 is -2, below 0"):
        PackGeometry().layout([3, -2, 1])
