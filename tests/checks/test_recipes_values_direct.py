"""Values fetched in any way that the room asks for are those that lie there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.checks.recipes import Ints
from opdtool.checks.recipes_values import Cells, Slots, as_keys, as_numbers, runs
from opdtool.checks.room import ROOM, Room
from tests.checks.judging import MemoryBatch

TABLE = torch.arange(40 * 50).reshape(40, 50)
ROOMS = [replace(ROOM, cells=cells, slots=7) for cells in (1, 30, 50, 120, 1000, 4000, 1 << 22)]


@dataclass
class CountedBatch(MemoryBatch):
    """Remembers how many values were read each time."""

    sizes: list[int] = field(default_factory=list)

    def read(self, name: str, rows: Any = slice(None), columns: slice | None = None) -> Tensor:
        found = MemoryBatch.read(self, name, rows, columns)
        self.sizes.append(found.numel())
        return found


def cells_of(room: Room, *, wide: int = 0, width: int = 50) -> tuple[Cells, CountedBatch]:
    table = TABLE[:, :width]
    if wide:
        table = table[..., None].expand(-1, -1, wide).contiguous()
    batch = CountedBatch({"ids": table}, np.array([]), width)
    cells = Cells(
        batch=batch,
        name="ids",
        width=width,
        decode=(lambda t: np.asarray(t[:, 0].numpy())) if wide else as_keys,
        room=room,
    )
    return (replace(cells, token_size=wide) if wide else cells), batch


def wanted(kind: str) -> tuple[Ints, Ints]:
    rng = np.random.default_rng(3)
    if kind == "runs":  # whole stretches of rows that follow each other
        return np.repeat(np.arange(3, 9), 20), np.tile(np.arange(10, 30), 6)
    if kind == "back":  # and to the first one once more
        return np.repeat([3, 4, 3, 2], 20), np.tile(np.arange(10, 30), 4)
    if kind == "few":
        return np.array([30, 2, 30, 17]), np.array([49, 0, 48, 25])
    if kind == "one":
        return np.array([39]), np.array([0])
    return rng.integers(40, size=300), rng.integers(50, size=300)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("wide", [0, 3, 600])
@pytest.mark.parametrize("kind", ["runs", "back", "few", "one", "all"])
def test_a_batchs_values_are_those_at_the_places_asked_for(
    room: Room, wide: int, kind: str
) -> None:
    rows, columns = wanted(kind)
    cells, _ = cells_of(room, wide=wide)
    expected = (rows * 50 + columns).tolist()
    for _ in range(2):  # from the rows at hand, too
        assert cells.at(rows, columns).tolist() == expected
    cells.forget()
    assert cells.at(rows, columns).tolist() == expected
    none = np.zeros(0, dtype=np.int64)
    assert cells.at(none, none).tolist() == []


def test_rows_that_were_read_are_kept_at_hand_until_they_are_forgotten() -> None:
    cells, batch = cells_of(ROOM)
    rows, columns = wanted("runs")
    cells.at(rows, columns)
    assert batch.sizes == [6 * 50]
    cells.at(rows[:40], columns[:40])
    assert len(batch.sizes) == 1
    cells.at(np.array([2, 3]), np.array([0, 0]))
    assert batch.sizes[1:] == [50]
    cells.forget()
    cells.at(rows, columns)
    assert batch.sizes[2:] == [6 * 50]


@pytest.mark.parametrize("cells", [100, 150, 300])
def test_no_more_is_read_at_a_time_or_kept_than_there_is_room_for(cells: int) -> None:
    held, batch = cells_of(replace(ROOM, cells=cells))
    rows, columns = wanted("all")
    held.at(rows, columns)
    assert max(batch.sizes) <= cells
    assert len(held._rows) * 50 <= cells


def test_of_rows_too_long_only_the_columns_around_are_read() -> None:
    held, batch = cells_of(replace(ROOM, cells=20))
    assert held.at(np.array([5, 5, 7]), np.array([10, 12, 40])).tolist() == [260, 262, 390]
    assert batch.sizes == [3, 1]
    assert not held._rows


def test_places_are_read_together_that_are_near_in_one_row_and_fit() -> None:
    places = np.array([0, 1, 5, 30, 31, 60])
    assert runs(places, 100, gap=10) == [(0, 3), (3, 5), (5, 6)]
    assert runs(places, 100, gap=4) == [(0, 3), (3, 5), (5, 6)]
    assert runs(places, 100, gap=3) == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert runs(places, 100, gap=100) == [(0, 6)]
    assert runs(places, 100) == [(0, 6)]
    assert runs(places, 31, gap=100) == [(0, 4), (4, 6)]
    assert runs(places, 6, gap=100) == [(0, 3), (3, 5), (5, 6)]
    assert runs(places, 5, gap=100) == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert runs(places, 100, np.array([1, 1, 1, 1, 2, 2]), gap=100) == [(0, 4), (4, 6)]
    assert runs(np.array([], dtype=np.int64), 5) == []


def slots_of(room: Room, sizes: list[int], wide: int = 1) -> tuple[Slots, list[int]]:
    read: list[int] = []
    ends = np.cumsum(sizes)
    values = torch.arange(int(ends[-1])) * 3

    def piece(r: int, a: int, b: int) -> Tensor:
        read.append(b - a)
        start = int(ends[r]) - sizes[r]
        return values[start + a : start + b]

    pieces = [lambda a, b, r=r: piece(r, a, b) for r in range(len(sizes))]
    slots = Slots(pieces=pieces, sizes=sizes, decode=as_keys, room=room, token_size=wide)
    return slots, read


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("sizes", [[30], [10, 10, 10], [0, 25, 5]])
def test_a_dump_counts_its_slots_through_its_pieces(room: Room, sizes: list[int]) -> None:
    slots, _ = slots_of(room, sizes)
    assert slots.total == 30
    asked = np.array([0, 3, 4, 9, 10, 11, 24, 25, 29])
    assert slots.take(asked).tolist() == (asked * 3).tolist()
    assert slots.read(8, 27).tolist() == [3 * i for i in range(8, 27)]
    assert slots.read(10, 10).tolist() == []
    assert slots.take(np.array([], dtype=np.int64)).tolist() == []
    at = [i for start, stop in slots.blocks() for i in range(start, stop)]
    assert at == list(range(30))
    slots.forget()
    assert slots.read(0, 30).tolist() == [3 * i for i in range(30)]


def test_a_small_dump_is_kept_once_it_was_read_and_a_large_one_is_not() -> None:
    slots, read = slots_of(replace(ROOM, cells=240), [30])
    slots.take(np.array([4]))
    assert read == [30]
    slots.read(3, 9)
    slots.take(np.array([20]))
    assert read == [30]
    slots.forget()
    slots.read(3, 9)
    assert read == [30, 6]
    large, read = slots_of(replace(ROOM, cells=239), [30])
    large.take(np.array([4, 6]))
    assert read == [3]
    wide, read = slots_of(replace(ROOM, cells=240), [30], wide=2)
    wide.take(np.array([4, 6]))
    assert read == [3]


def test_blocks_are_as_long_as_the_room_for_slots_or_a_quarter_of_its_cells() -> None:
    assert slots_of(replace(ROOM, slots=20), [30])[0].blocks() == [(0, 20), (20, 30)]
    assert slots_of(replace(ROOM, cells=80), [30])[0].blocks() == [(0, 20), (20, 30)]
    assert slots_of(replace(ROOM, cells=80), [30], wide=2)[0].blocks()[:2] == [(0, 10), (10, 20)]
    assert slots_of(replace(ROOM, cells=1), [3])[0].blocks() == [(0, 1), (1, 2), (2, 3)]


def test_masks_become_numbers_that_hold_them_exactly() -> None:
    for dtype in (torch.float64, torch.int64, torch.int32):
        assert as_numbers(torch.tensor([1, 2], dtype=dtype)).dtype == np.float64
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float32):
        found = as_numbers(torch.tensor([0, 1]).to(dtype))
        assert found.dtype == np.float32
        assert found.tolist() == [0.0, 1.0]


def test_tokens_become_one_number_equal_where_they_are() -> None:
    assert as_keys(torch.tensor([3, -5, 2**40])).tolist() == [3, -5, 2**40]
    assert as_keys(torch.tensor([True, False])).tolist() == [1, 0]
    zeros = as_keys(torch.tensor([0.0, -0.0, 1.0]))
    assert zeros[0] == zeros[1] == 0
    assert zeros[2] != 0
    near = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert len({*as_keys(near).tolist()}) == 1
    assert len({*as_keys(near, wide=True).tolist()}) == 2
    whole = as_keys(torch.tensor([1, 2]), floats=True)
    assert whole.tolist() == as_keys(torch.tensor([1.0, 2.0])).tolist()
    wide = as_keys(torch.tensor([[1, 2, 3], [1, 2, 3], [3, 2, 1], [0, 0, 0]]))
    assert wide[0] == wide[1] != wide[2]
    assert wide[3] == 0
    deep = as_keys(torch.arange(12).reshape(2, 2, 3))
    assert deep.shape == (2,)
    assert deep[0] == as_keys(torch.arange(6).reshape(1, 6))[0]
    assert as_keys(torch.zeros(0, 3)).tolist() == []
    assert as_keys(torch.tensor([[5], [6]])).tolist() == [5, 6]
    nan = as_keys(torch.tensor([float("nan"), float("nan")]))
    assert nan[0] == nan[1]
