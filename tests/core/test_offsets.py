"""Runs, windows and pieces against hand-worked arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opdtool.core.offsets import (
    Pieces,
    as_offsets,
    check_cp_multiple,
    check_cp_rank,
    cp_window,
    runs,
)

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_runs_are_the_integers_of_each_run_one_after_the_other() -> None:
    assert runs(ints(5, 0), ints(2, 3)).tolist() == [5, 6, 0, 1, 2]
    assert runs(ints(7), ints(1)).tolist() == [7]
    assert runs(ints(3, 3, 1), ints(1, 2, 1)).tolist() == [3, 3, 4, 1]


def test_no_runs_are_no_integers() -> None:
    found = runs(ints(), ints())
    assert found.tolist() == []
    assert found.dtype == np.int64


def test_windows_of_three_ranks_are_thirds_that_mirror() -> None:
    assert cp_window(12, 0, 3) == (slice(0, 2), slice(10, 12))
    assert cp_window(12, 1, 3) == (slice(2, 4), slice(8, 10))
    assert cp_window(12, 2, 3) == (slice(4, 6), slice(6, 8))
    with pytest.raises(ValueError, match=r"8 slots .* cp_size 3: .* multiple of 6"):
        cp_window(8, 0, 3)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (1, 1)])
def test_a_rank_outside_its_size_is_refused_by_name(rank: int, size: int) -> None:
    said = rf"cp_rank is {rank}, outside 0..{size - 1} for cp_size {size}"
    with pytest.raises(ValueError, match=said):
        check_cp_rank(rank, size)
    with pytest.raises(ValueError, match=said):
        cp_window(8, rank, size)


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"cp_size is {size}; it must be at least 1"):
        check_cp_rank(0, size)


def test_the_first_padded_length_that_cannot_be_cut_is_named() -> None:
    check_cp_multiple(ints(6, 12, 0), 3)
    check_cp_multiple(ints(5, 7), 1)
    said = r"sequence 1 has a padded length of 8, .* multiple of 6 \(2 x cp_size 3\)"
    with pytest.raises(ValueError, match=said):
        check_cp_multiple(ints(6, 8, 10), 3)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.uint16, torch.uint32, torch.uint64])
def test_offsets_of_every_integer_dtype_are_the_same_int64_array(dtype: torch.dtype) -> None:
    want = [0, 5, 100, 127]
    found = as_offsets(torch.tensor(want).to(dtype))
    assert found.dtype == np.int64
    assert found.tolist() == want
    assert as_offsets(tuple(want)).tolist() == want
    assert as_offsets(np.array(want, dtype=np.uint16)).tolist() == want


def test_offsets_of_a_strided_view_are_its_values() -> None:
    view = torch.tensor([[0, 9], [5, 9], [8, 9]])[:, 0]
    assert not view.is_contiguous()
    found = as_offsets(view)
    assert found.tolist() == [0, 5, 8]
    assert found.flags.c_contiguous


def test_clipped_pieces_keep_what_is_filled_from_the_positions_asked_for() -> None:
    pieces = Pieces(
        dst=ints(0, 10, 20), segment=ints(0, 1, 2), position=ints(0, 4, 2), count=ints(5, 3, 2)
    )
    clipped = pieces.clip(2, 5)
    assert clipped.dst.tolist() == [2, 10, 20]
    assert clipped.segment.tolist() == [0, 1, 2]
    assert clipped.position.tolist() == [2, 4, 2]
    assert clipped.count.tolist() == [3, 1, 2]
    assert pieces.clip(4, 5).segment.tolist() == [0, 1]
    assert pieces.clip(7, 9).segment.tolist() == []
