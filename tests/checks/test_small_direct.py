"""Places in words, sizes of blocks, and draft logits beside the teacher's columns."""

from __future__ import annotations

import math

import pytest
import torch

from opdtool.checks.places import describe, number
from opdtool.checks.room import ROOM, Room
from opdtool.checks.vocab_logits import (
    Tally,
    compare_block,
    differs,
    draft_logits_finding,
    misreadings,
    wrong_columns,
)
from opdtool.findings import MAX_PLACES


def test_a_place_is_said_as_far_as_it_is_known() -> None:
    place = {"slot": 812, "cp_rank": 1, "position": 17, "expected": 1.0, "actual": 0.25}
    assert describe(place | {"sequence": 3, "pack": "pack-00001"}) == (
        "pack-00001, sequence 3, position 17 (slot 812, rank 1): expected 1, found 0.25"
    )
    assert describe(place | {"segment": 4, "token_ids": "7 [8] 9"}) == (
        "segment 4 (no row of the batch), position 17 (slot 812, rank 1): expected 1, found 0.25 "
        "(token ids 7 [8] 9)"
    )
    assert describe({"slot": 5, "expected": 3, "actual": 4}) == "slot 5: expected 3, found 4"


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1"), (0.1, "0.1"), (1 / 3, repr(1 / 3)), (7, "7"), (1e-9, "1e-09")]
)
def test_a_number_is_as_short_as_it_is_exact(value: float | int, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("memory", "values", "long", "slots", "cells"),
    [
        (0, 1 << 15, 1 << 15, 1 << 14, 1 << 17),
        (1 << 23, 1 << 17, 1 << 17, 1 << 14, 1 << 17),
        (1 << 24, 1 << 18, 1 << 18, 1 << 15, 1 << 18),
        (1 << 28, 1 << 20, 1 << 22, 1 << 16, 1 << 22),
        (1 << 40, 1 << 20, 1 << 24, 1 << 16, 1 << 22),
    ],
)
def test_what_is_held_at_a_time_grows_with_the_memory_between_two_ends(
    memory: int, values: int, long: int, slots: int, cells: int
) -> None:
    assert Room.within(memory) == Room(values=values, long=long, slots=slots, cells=cells)


def test_a_check_that_is_not_told_otherwise_holds_the_most_that_helps() -> None:
    assert Room(values=1 << 20, long=1 << 24, slots=1 << 16, cells=1 << 22) == ROOM


INF, NAN = math.inf, math.nan


def test_draft_logits_differ_past_the_tolerance_and_infinities_from_all_but_themselves() -> None:
    expected = torch.tensor([1.0, 2.0, INF, -INF, INF, NAN, 4.0, 0.0])
    actual = torch.tensor([1.5, 2.6, INF, -INF, 3.0, NAN, INF, 0.0])
    found = differs(actual, expected, rtol=0.0, atol=0.5)
    assert found.tolist() == [False, True, False, False, True, True, True, False]
    relative = differs(torch.tensor([3.0, 3.1]), torch.tensor([2.0, 2.0]), rtol=0.5, atol=0.0)
    assert relative.tolist() == [False, True]
    both = differs(torch.tensor([3.25, 3.5]), torch.tensor([2.0, 2.0]), rtol=0.5, atol=0.25)
    assert both.tolist() == [False, True]


def test_a_blocks_mismatches_are_placed_from_its_corner_on_and_tallies_add_up() -> None:
    mapped = torch.arange(8.0).reshape(1, 2, 4)
    recorded = mapped.clone()
    recorded[0, 1, 2] = 9.0
    recorded[0, 0, 3] = 2.0
    found = compare_block(mapped, recorded, rtol=0, atol=0, corner=(5, 10, 20))
    assert (found.total, found.mismatches, found.greatest) == (8, 2, 3.0)
    assert found.first == [(5, 10, 23, 3.0, 2.0), (5, 11, 22, 6.0, 9.0)]
    right = compare_block(mapped, mapped, rtol=0, atol=0, corner=(0, 0, 0))
    assert (right.total, right.mismatches, right.greatest, right.first) == (8, 0, 0.0, [])
    earlier = Tally(total=4, mismatches=1, greatest=7.0, first=[(1, 0, 0, 0.0, 7.0)])
    found.merge(earlier)
    assert (found.total, found.mismatches, found.greatest) == (12, 3, 7.0)
    assert [place[0] for place in found.first] == [1, 5, 5]
    many = Tally()
    for at in range(MAX_PLACES + 3):
        many.merge(Tally(total=1, mismatches=1, first=[(at, 0, 0, 0.0, 1.0)]))
    assert [place[0] for place in many.first] == list(range(MAX_PLACES))


def test_an_error_that_is_no_number_is_the_greatest() -> None:
    found = compare_block(
        torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[NAN, 3.0]]]), rtol=0, atol=0, corner=(0, 0, 0)
    )
    assert found.greatest == INF
    assert found.mismatches == 2


def test_only_so_many_places_of_a_block_are_kept() -> None:
    zeros = torch.zeros(1, 3, MAX_PLACES)
    found = compare_block(zeros, zeros + 1, rtol=0, atol=0, corner=(0, 0, 0))
    assert (found.mismatches, len(found.first)) == (3 * MAX_PLACES, MAX_PLACES)


def test_the_finding_says_the_tolerance_and_the_greatest_error() -> None:
    bad = Tally(total=1500, mismatches=1, greatest=3.0, first=[(5, 10, 23, 3.0, 2.0)])
    found = draft_logits_finding(bad, 0.0, 0.0)
    assert (found.code, found.status, found.mismatches, found.total) == ("OPD418", "fail", 1, 1500)
    assert found.message == "greatest error 3; values must be equal"
    assert found.first == (
        {"sequence": 5, "position": 10, "draft_id": 23, "expected": 3.0, "actual": 2.0},
    )
    good = draft_logits_finding(Tally(total=1500), 0.5, 0.25)
    assert (good.status, good.message) == (
        "pass",
        "all 1,500 values are within atol 0.25 + rtol 0.5",
    )
    assert "within" in draft_logits_finding(Tally(total=1), 0.5, 0.0).message
    assert "within" in draft_logits_finding(Tally(total=1), 0.0, 0.5).message


def test_misread_maps_pick_their_columns_where_they_can_be_and_differ() -> None:
    d2t = torch.tensor([1, 2, 2])  # targets 1, 3, 4
    found = {fault: ids.tolist() for fault, ids in wrong_columns(d2t, 5).items()}
    assert found == {"d2t-absolute": [1, 2, 2], "d2t-all-zero": [0, 1, 2], "d2t-arange": [0, 2, 4]}
    assert "d2t-arange" not in wrong_columns(d2t, 4)
    assert "d2t-absolute" not in wrong_columns(torch.tensor([1, -1, 0]), 5)
    assert "d2t-all-zero" not in wrong_columns(torch.zeros(3, dtype=torch.int64), 5)
    assert "d2t-arange" not in wrong_columns(torch.tensor([0, 1, 2]), 9)  # it is the map itself
    assert "d2t-absolute" in wrong_columns(torch.tensor([0, 4], dtype=torch.uint8), 5)
    assert "d2t-absolute" not in wrong_columns(torch.tensor([0, 5], dtype=torch.uint8), 5)


def test_a_misreading_is_exact_and_comes_with_its_mend() -> None:
    (found,) = misreadings(["d2t-arange"])
    assert (found.fault, found.match) == ("d2t-arange", "exact")
    assert "columns 2i" in found.message
    assert found.fix
