"""The equivalence suite's slow statements, cases and verdicts, against hand-worked arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opdtool.checks import ranks_reference as slow
from opdtool.checks.ranks_cases import (
    MAX_PAYLOAD,
    TEACHERS,
    build_case,
    describe,
    generated_cases,
    geometries,
)
from opdtool.checks.ranks_verdicts import Verdicts
from opdtool.core.geometry import PackGeometry
from opdtool.findings import MAX_PLACES

CODE = "OPD701"


# The slow statements


def test_offsets_pad_each_sequence_and_then_the_total() -> None:
    assert slow.offsets([3, 4, 1], 4, 1, "absorb") == ([0, 3, 7, 8], [0, 4, 8, 12])
    assert slow.offsets([3, 4, 1], 1, 1, "absorb") == ([0, 3, 7, 8], [0, 3, 7, 8])
    assert slow.offsets([3, 4], 4, 10, "absorb") == ([0, 3, 7], [0, 4, 10])
    assert slow.offsets([3, 4], 4, 10, "segment") == ([0, 3, 7, 7], [0, 4, 8, 10])
    assert slow.offsets([3, 4], 4, 8, "segment") == ([0, 3, 7], [0, 4, 8])
    assert slow.offsets([3, 4], 4, 8, "absorb") == ([0, 3, 7], [0, 4, 8])


ROWS = np.array([[1, 2, 3, 9], [4, 9, 9, 9]])


def test_rows_are_packed_and_rolled_in_their_segments() -> None:
    assert slow.packed(ROWS, [3, 1], [0, 4, 6], 0).tolist() == [1, 2, 3, 0, 4, 0]
    assert slow.packed(ROWS, [3, 1], [0, 4, 6], -1).tolist() == [2, 3, 0, 1, 0, 4]
    assert slow.packed(ROWS, [3, 1], [0, 4, 6, 8], 1).tolist() == [0, 1, 2, 3, 0, 4, 0, 0]
    wide = slow.packed(np.stack([ROWS, -ROWS], axis=-1), [3, 1], [0, 4, 6], -1)
    assert wide.shape == (6, 2)
    assert wide[:, 1].tolist() == [-2, -3, 0, -1, 0, -4]


def test_windows_are_zig_zag_and_slots_those_of_each_segment() -> None:
    assert [slow.window(8, rank, 2) for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [slow.window(6, rank, 3) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert slow.window(5, 0, 1) == [0, 1, 2, 3, 4]
    assert slow.shard_slots([0, 4, 12], 1, 2) == [1, 2, 6, 7, 8, 9]
    assert slow.shard_slots([0, 4, 12], 0, 2) == [0, 3, 4, 5, 10, 11]


def test_a_roll_ends_each_segment_with_zero() -> None:
    pack = np.array([1, 2, 3, 4, 5, 6])
    assert slow.rolled(pack, [0, 3, 3, 5, 6]).tolist() == [2, 3, 0, 5, 0, 0]


def test_the_mask_holds_the_weight_of_the_next_token() -> None:
    weights = np.array([[0.5, 1.0, 2.0, 7.0], [3.0, 7.0, 7.0, 7.0], [7.0, 4.0, 7.0, 7.0]])
    found = slow.draft_mask(weights, [3, 1, 2], [0, 4, 6, 8, 10])
    assert found.tolist() == [1.0, 2.0, 0, 0, 0, 0, 4.0, 0, 0, 0]
    assert slow.draft_mask(weights, [0, 1, 0], [0, 2, 4, 6]).tolist() == [0] * 6


def test_each_row_goes_through_its_own_head_and_errors_are_bounded_by_its_size() -> None:
    hidden = np.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    heads = [np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 1.0], [2.0, -1.0]])]
    assert slow.products(hidden, heads, [1, 0]).tolist() == [[[3.0, 0.0]], [[3.0, 4.0]]]
    bound = slow.product_bound(hidden[1:], 2 * heads[0], np.array([[[5.0, 0.0]]]), 0.25)
    sums = 8 * 2.0**-23 * 2**0.5 * 5.0 * 2.0  # |x| = 5, |w| = 2, H = 2
    assert bound.tolist() == [[[pytest.approx(1.25 + sums), pytest.approx(sums)]]]
    nothing = slow.product_bound(0 * hidden, heads[0], np.zeros((2, 1, 2)), 0.25)
    assert (nothing == 2.0**-126).all()


def test_draft_columns_and_their_gradients_are_those_of_the_targets() -> None:
    logits = np.array([[10.0, 11.0, 12.0, 13.0]])
    assert slow.columns(logits, [2, 0, 1]).tolist() == [[12.0, 11.0, 13.0]]
    gradients = slow.column_gradients(np.array([[1.0, 2.0, 4.0]]), [2, 1, 1], 4)
    assert gradients.tolist() == [[0.0, 0.0, 3.0, 4.0]]


# The cases


def test_three_ways_of_padding_are_tried() -> None:
    plain, parallel, odd = geometries(2, 2)
    assert plain == PackGeometry(cp_size=2, tp_size=2)
    assert (parallel.sequence_multiple, parallel.total_multiple) == (8, 16 * 4 * 2)
    assert (odd.sequence_multiple, odd.tail, odd.total_multiple) == (12, "segment", 20)
    assert describe(plain) == "TP 2, CP 2, sequences to 4, total to 4 (absorb)"
    assert describe(odd) == "TP 2, CP 2, sequences to 12, total to 20 (segment)"
    assert describe(parallel).startswith("TP 2, CP 2, sequence-parallel, sequences to 8")


def test_generated_cases_hold_the_shortest_and_the_longest_rows() -> None:
    cases = generated_cases(40, 2, seed=3)
    assert [case.name for case in cases] == [f"generated {n}" for n in range(40)]
    for case in cases:
        B, S = case.input_ids.shape
        assert case.rows == B == len(case.lengths)
        assert 1 <= B <= 9
        assert 2 <= S <= 48
        assert case.lengths[1:4] == (1, 2, S)[: max(B - 1, 0)]
        assert all(1 <= n <= S for n in case.lengths)
        assert 1 <= int(case.input_ids.min()) <= int(case.input_ids.max()) < 1000
        assert case.input_ids.dtype == torch.int64
        assert set(case.token_mask.flatten().tolist()) <= {0.0, 1.0}
        assert case.token_mask.shape == (B, S)
        assert set(case.sample_mask.tolist()) <= {0.0, 1.0}
        assert case.sample_mask.shape == (B,)
    seen = torch.cat([case.token_mask.flatten() for case in cases])
    assert 0.55 < float(seen.mean()) < 0.65
    kept = torch.cat([case.sample_mask for case in cases])
    assert 0.7 < float(kept.mean()) < 0.9
    assert {case.rows for case in cases} == set(range(1, 10))
    again = generated_cases(40, 2, seed=3)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(cases, again, strict=True))
    other = generated_cases(40, 2, seed=4)
    assert not all(torch.equal(a.hidden, b.hidden) for a, b in zip(cases, other, strict=False))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sizes_of_a_case_divide_by_the_ranks_and_its_parts_fit_each_other(tp: int) -> None:
    dtypes, sizes = set(), set()
    for case in generated_cases(60, tp, seed=1):
        R, S, H = case.hidden.shape
        V = case.heads[0].shape[0]
        sizes.add((V // tp, len(case.d2t) // tp))
        assert V % tp == 0
        assert len(case.d2t) % tp == 0
        assert case.logits.shape == (R, S, V)
        assert len(case.heads) == len(case.integer_heads) == TEACHERS
        assert all(head.shape == (V, H) for head in case.heads)
        assert all(head.dtype == case.hidden.dtype for head in case.heads)
        assert case.integers.shape == (R, S, 8)
        assert all(head.shape == (V, 8) for head in case.integer_heads)
        assert all(0 <= tag < TEACHERS for tag in case.teacher)
        assert len(case.teacher) == R
        assert R * S <= MAX_PAYLOAD
        ids = torch.arange(len(case.d2t)) + case.d2t
        assert 0 <= int(ids.min()) <= int(ids.max()) < V
        for whole in (case.integers, *case.integer_heads, case.draft_weights):
            assert torch.equal(whole, whole.round())
            assert float(whole.abs().max()) <= 4
        assert case.draft_weights.shape == (R, S, len(case.d2t))
        assert case.payload_lengths == tuple(min(n, S) for n in case.lengths[:R])
        dtypes.add(case.hidden.dtype)
    assert dtypes == {torch.float32, torch.bfloat16}
    assert sizes == {(v, d) for v in range(3, 9) for d in range(1, 4)}


def test_a_batchs_own_payload_is_taken_as_far_as_there_is_room() -> None:
    hidden = torch.arange(3 * 4 * 2.0).reshape(3, 4, 2)
    given = {
        "name": "own",
        "input_ids": torch.ones(3, 4, dtype=torch.int64),
        "lengths": [4, 2, 3],
        "token_mask": torch.ones(3, 4),
        "sample_mask": torch.ones(3),
    }

    def case(positions: int) -> tuple[list[int], list[int], tuple[int, ...]]:
        found = build_case(
            **given,  # type: ignore[arg-type]
            tp_size=1,
            random=np.random.default_rng(0),
            hidden=hidden.bfloat16(),
            teacher=[5, 1, 3],
            positions=positions,
        )
        R, S, _ = found.hidden.shape
        assert torch.equal(found.hidden, hidden[:R, :S].bfloat16())
        assert found.hidden.dtype == torch.bfloat16
        return [R, S], list(found.teacher), found.payload_lengths

    assert case(100) == ([3, 4], [2, 1, 0], (4, 2, 3))
    assert case(8) == ([2, 4], [2, 1], (4, 2))
    assert case(11) == ([2, 4], [2, 1], (4, 2))
    assert case(3) == ([1, 3], [2], (3,))
    assert case(1) == ([1, 1], [2], (1,))


# The verdicts


def test_values_are_counted_by_geometry_and_the_first_wrong_ones_are_placed() -> None:
    verdicts = Verdicts()
    verdicts.same(
        CODE, "a", {"case": "one"}, np.array([[1, 2], [3, 4]]), np.array([[1, 5], [3, 6]])
    )
    verdicts.same(CODE, "a", {"case": "two"}, np.array([7]), np.array([7]))
    verdicts.same(CODE, "b", {"case": "one"}, np.array([7.0]), np.array([8.0]))
    (found,) = [f for f in verdicts.findings({}) if f.code == CODE]
    assert (found.status, found.mismatches, found.total) == ("fail", 3, 6)
    assert found.message.startswith("3 of 6 values differ: not so that ")
    assert list(found.first) == [
        {"case": "one", "geometry": "a", "index": 1, "expected": 5, "actual": 2},
        {"case": "one", "geometry": "a", "index": 3, "expected": 6, "actual": 4},
        {"case": "one", "geometry": "b", "index": 0, "expected": 8.0, "actual": 7.0},
    ]
    verdicts.same("OPD702", "b", {}, np.array([1]), np.array([1]))
    first, second = verdicts.tables()
    assert (first.title, second.title) == ("a", "b")
    assert ([row[0] for row in first.rows], len(second.rows)) == ([CODE], 2)
    assert first.rows[0][2:] == ("5", "2", "fail")
    assert second.rows[0][2:] == ("1", "1", "fail")


def test_what_agrees_passes_and_what_was_not_asked_is_skipped_with_the_reason() -> None:
    verdicts = Verdicts()
    verdicts.near(CODE, "a", {}, np.array([1.0, 2.5]), np.array([1.0, 2.0]), np.array([0.0, 0.5]))
    found = {f.code: f for f in verdicts.findings({"OPD702": "no mask"})}
    assert (found[CODE].status, found[CODE].mismatches, found[CODE].total) == ("pass", 0, 2)
    assert "differ" not in found[CODE].message
    assert (found["OPD702"].status, found["OPD702"].message) == ("skip", "no mask")
    assert found["OPD703"].message == "nothing was compared"
    assert all(code.startswith("OPD7") for code in found)
    (table,) = verdicts.tables()
    assert len(table.rows) == 1
    assert table.rows[0][2:] == ("2", "0", "pass")


def test_past_the_bound_and_nan_are_wrong() -> None:
    verdicts = Verdicts()
    actual = np.array([1.6, np.nan, 2.4], np.float32)
    verdicts.near(CODE, "a", {}, actual, np.array([1.0, 1.0, 3.0]), np.array([0.5, 9.0, 0.5]))
    (found,) = [f for f in verdicts.findings({}) if f.code == CODE]
    assert [place["index"] for place in found.first] == [0, 1, 2]


@pytest.mark.parametrize("check", ["same", "near"])
def test_another_shape_is_wrong_everywhere(check: str) -> None:
    verdicts = Verdicts()
    bound = [np.ones(4)] if check == "near" else []
    getattr(verdicts, check)(CODE, "a", {}, np.zeros(3), np.zeros(4), *bound)
    (found,) = [f for f in verdicts.findings({}) if f.code == CODE]
    assert (found.mismatches, found.total) == (4, 4)
    assert np.isnan(float(found.first[0]["actual"] or 0))


def test_only_so_many_places_are_kept() -> None:
    verdicts = Verdicts()
    for _ in range(3):
        verdicts.same(CODE, "a", {}, np.zeros(6), np.ones(6))
    (found,) = [f for f in verdicts.findings({}) if f.code == CODE]
    assert len(found.first) == MAX_PLACES
    assert (found.mismatches, found.total) == (18, 18)
