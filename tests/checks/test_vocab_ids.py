"""Offsets or ids: what a map without a t2d proves, suggests, and leaves open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opdtool.checks.vocab_case import DraftCase
from opdtool.checks.vocab_faults import judge_draft_vocab
from opdtool.findings import Finding


def offsets(ids: Tensor) -> Tensor:
    """A right map: id less draft id, one entry at a time."""
    return torch.tensor([target - i for i, target in enumerate(ids.tolist())])


def read_as_offsets(values: Tensor) -> list[int]:
    return [i + value for i, value in enumerate(values.tolist())]


def leaves_or_collides(values: Tensor, vocab: int | None) -> bool:
    ids = read_as_offsets(values)
    high = max(ids) + 1 if vocab is None else vocab
    return len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= high


def faults(case: DraftCase) -> list[tuple[str, str]]:
    return [(each.fault, each.match) for each in judge_draft_vocab(case)[1]]


def failed(findings: list[Finding]) -> set[str]:
    return {each.name for each in findings if each.status == "fail"}


def status(case: DraftCase, name: str) -> str:
    return next(each.status for each in judge_draft_vocab(case)[0] if each.name == name)


def chosen(vocab: int, size: int, seed: int) -> Tensor:
    """``size`` of ``vocab`` ids in no order."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab, generator=rng)[:size]


SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from([(12, 6), (320, 32), (1000, 250), (32_000, 800), (128_256, 8192)])
# With a few ids a random order is now and then an ascending one with a slip in it.
OPEN = st.sampled_from([(320, 32), (1000, 250), (32_000, 800), (128_256, 8192)])


# ---------------------------------------------------------------- right maps


def right_ids(vocab: int, size: int, seed: int, kind: str) -> Tensor:
    """Target ids of every kind that tools write or people try."""
    some = chosen(vocab, size, seed)
    sparse = torch.randperm(vocab // 2, generator=torch.Generator().manual_seed(seed))[:size] * 2
    kinds = {
        "ascending": some.sort().values,
        "by frequency": some,
        "falling": some.sort(descending=True).values,
        "sparse": sparse.sort().values,
        "sparse by frequency": sparse,
        "dense": torch.arange(size) + 3,
        "dense by frequency": chosen(size, size, seed) + 3,
        "every third": 3 * torch.arange(size),
        "blocks": torch.cat([torch.arange(size // 2), vocab - torch.arange(1, size // 2 + 1)]),
    }
    return kinds[kind]


KINDS = (
    *("ascending", "by frequency", "falling", "sparse", "sparse by frequency"),
    *("dense", "dense by frequency", "every third", "blocks"),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(size=SIZES, seed=SEEDS, told=st.booleans())
def test_a_right_map_of_any_kind_never_fails_with_or_without_a_vocabulary_size(
    kind: str, size: tuple[int, int], seed: int, told: bool
) -> None:
    vocab, entries = 3 * size[0], size[1]
    ids = right_ids(vocab, entries, seed, kind)
    assert len(set(ids.tolist())) == entries
    assert int(ids.min()) >= 0
    assert int(ids.max()) < vocab
    case = DraftCase(d2t=offsets(ids), vocab_size=vocab if told else None)
    if case.all_zero or case.arange:
        return  # known faults that nothing here excuses
    findings, diagnosis = judge_draft_vocab(case)
    assert failed(findings) == set()
    assert diagnosis == []


@pytest.mark.parametrize("size", [32, 64, 100, 1000, 30_000])
@pytest.mark.parametrize("step", [3, 4, 10])
def test_a_map_without_neighbours_warns_at_most(size: int, step: int) -> None:
    d2t = offsets(step * torch.arange(size))
    for vocab in (None, step * size, 10 * step * size):
        case = DraftCase(d2t=d2t, vocab_size=vocab)
        assert faults(case) == []
        assert status(case, "d2t-offsets") in ("pass", "warn")
    assert status(DraftCase(d2t=d2t), "d2t-offsets") == "warn"


# ---------------------------------------------------------------- ids for offsets


@settings(max_examples=60, deadline=None)
@given(size=OPEN, seed=SEEDS, told=st.booleans(), order=st.sampled_from(["up", "no", "down"]))
def test_ids_in_any_order_are_named_first_where_as_offsets_they_leave_or_collide(
    size: tuple[int, int], seed: int, told: bool, order: str
) -> None:
    vocab = size[0] if told else None
    values = chosen(*size, seed)
    if order != "no":
        values = values.sort(descending=order == "down").values
    if not leaves_or_collides(values, vocab):
        assert failed(judge_draft_vocab(DraftCase(d2t=values, vocab_size=vocab))[0]) <= {
            "d2t-offsets"
        }
        return
    found = faults(DraftCase(d2t=values, vocab_size=vocab))
    assert found[0] == ("d2t-absolute", "likely")
    assert set(found[1:]) <= {("d2t-out-of-range", "exact"), ("d2t-duplicate-targets", "exact")}
    assert len(found) > 1


@pytest.mark.parametrize("ids", [[1, 2, 5, 7], [7, 1, 5, 2], [2, 7, 1, 5], [5, 1, 2, 7]])
def test_four_ids_of_eight_are_named_in_every_order(ids: list[int]) -> None:
    case = DraftCase(d2t=torch.tensor(ids), vocab_size=8)
    assert leaves_or_collides(case.d2t, 8)
    assert faults(case)[0] == ("d2t-absolute", "likely")


def test_ids_by_frequency_that_stay_in_range_are_told_by_their_collisions() -> None:
    values = chosen(100_000, 8192, 5)
    as_offsets = read_as_offsets(values)
    assert max(as_offsets) < 128_256
    assert len(set(as_offsets)) < 8192
    case = DraftCase(d2t=values, vocab_size=128_256)
    assert faults(case) == [("d2t-absolute", "likely"), ("d2t-duplicate-targets", "exact")]
    said = judge_draft_vocab(case)[1][0].message
    assert "collide" in said
    assert "leave" not in said


def test_ids_alone_only_warn_where_as_offsets_they_are_a_map_too() -> None:
    values = chosen(32_000, 8_000, 0).sort().values
    assert not leaves_or_collides(values, None)
    findings, diagnosis = judge_draft_vocab(DraftCase(d2t=values))
    assert (failed(findings), diagnosis) == (set(), [])
    offsets_check = next(each for each in findings if each.name == "d2t-offsets")
    assert offsets_check.status == "warn"
    assert "d2t-absolute" in offsets_check.message


def test_another_map_of_the_same_ids_proves_ids_in_another_order() -> None:
    ids = chosen(1000, 100, 7)
    case = DraftCase(d2t=ids, vocab_size=5000, against=ids.sort().values)
    assert faults(case)[0] == ("d2t-absolute", "exact")


def test_a_map_that_equals_another_of_ids_is_not_excused_by_it() -> None:
    ids = torch.tensor([1, 4, 5, 7])
    wrong = DraftCase(d2t=ids, vocab_size=8, against=torch.tensor(read_as_offsets(ids)))
    assert wrong.equals_against
    assert faults(wrong) == [("d2t-absolute", "likely"), ("d2t-out-of-range", "exact")]


def test_a_t2d_that_the_offsets_fit_better_speaks_against_ids() -> None:
    ids = torch.arange(0, 900, 9)
    t2d = torch.zeros(1000, dtype=torch.bool)
    t2d[ids] = True
    d2t = offsets(ids)
    d2t[50] = 960  # target id 1010; as ids all are distinct and inside
    assert int(d2t.max()) < 1000
    assert len(set(d2t.tolist())) == 100
    found = faults(DraftCase(d2t=d2t, t2d=t2d))
    assert [name for name, _ in found] == [
        "d2t-out-of-range",
        "t2d-mismatch",
        "d2t-order-with-t2d",
    ]


def test_required_ids_speak_for_ids_only_where_chance_would_not_put_them_there() -> None:
    d2t = torch.tensor([2, 5, 9])
    case = DraftCase(d2t=d2t, vocab_size=100, must_include=(9,))
    assert [name for name, _ in faults(case)] == ["d2t-absolute", "special-token-missing"]
    tight = replace(case, vocab_size=12)  # three of twelve: a quarter of all ids would be there
    assert faults(tight) == [("special-token-missing", "exact")]


# ---------------------------------------------------------------- offsets with an error in them


def spoilt(ids: Tensor, draft_id: int, target: int) -> Tensor:
    d2t = offsets(ids)
    d2t[draft_id] = target - draft_id
    return d2t


def test_one_entry_past_the_end_of_a_sparse_map_is_that_and_no_map_of_ids() -> None:
    d2t = torch.tensor([5, 60, 70, 80, 90, 100, 110, 120])
    assert faults(DraftCase(d2t=d2t, vocab_size=1000)) == []
    d2t[3] = 997
    assert not leaves_or_collides(d2t, 1001)
    assert faults(DraftCase(d2t=d2t, vocab_size=1000)) == [("d2t-out-of-range", "exact")]


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS,
    size=st.sampled_from([(1000, 8), (4000, 40), (50_000, 100), (128_256, 64)]),
    fault=st.sampled_from(["end", "past", "negative", "huge"]),
    told=st.booleans(),
    data=st.data(),
)
def test_one_entry_out_of_range_is_named_alone_in_sparse_maps(
    seed: int, size: tuple[int, int], fault: str, told: bool, data: st.DataObject
) -> None:
    vocab, entries = size
    ids = chosen(vocab // 3, entries, seed).sort().values * 3  # no neighbours
    # The last entry alone keeps the values rising, as ids would: that is open but at the end.
    last = entries - 1 if fault == "end" else entries - 2
    k = data.draw(st.integers(0, last))
    target = {"end": vocab, "past": vocab + k // 2, "negative": -1, "huge": 2**40}[fault]
    d2t = spoilt(ids, k, target)
    if not told and target >= vocab:
        return  # without a size there is no end to be past
    case = DraftCase(d2t=d2t, vocab_size=vocab if told else None)
    assert faults(case) == [("d2t-out-of-range", "exact")]


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS,
    size=st.sampled_from([(1000, 8), (4000, 40), (50_000, 100), (128_256, 64)]),
    told=st.booleans(),
    data=st.data(),
)
def test_two_draft_ids_of_one_target_are_named_alone_in_sparse_maps(
    seed: int, size: tuple[int, int], told: bool, data: st.DataObject
) -> None:
    vocab, entries = size
    ids = chosen(vocab // 3, entries, seed).sort().values * 3
    k, other = data.draw(
        st.lists(st.integers(0, entries - 1), min_size=2, max_size=2, unique=True).map(tuple)
    )
    d2t = spoilt(ids, k, int(ids[other]))
    assert leaves_or_collides(d2t, vocab)
    case = DraftCase(d2t=d2t, vocab_size=vocab if told else None)
    assert faults(case) == [("d2t-duplicate-targets", "exact")]


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, kind=st.sampled_from(["end", "twice"]), data=st.data())
def test_one_wrong_entry_of_a_sparse_map_by_frequency_is_named_alone(
    seed: int, kind: str, data: st.DataObject
) -> None:
    vocab, entries = 128_256, 64
    ids = chosen(vocab, entries, seed)
    k = data.draw(st.integers(0, entries - 1))
    d2t = spoilt(ids, k, vocab if kind == "end" else int(ids[k - 1]))
    name = "d2t-out-of-range" if kind == "end" else "d2t-duplicate-targets"
    assert faults(DraftCase(d2t=d2t, vocab_size=vocab)) == [(name, "exact")]


def test_ascending_ids_with_two_of_them_swapped_are_still_ids() -> None:
    ids = chosen(1000, 250, 3).sort().values
    ids[[100, 101]] = ids[[101, 100]]
    outside = sum(target >= 1000 for target in read_as_offsets(ids))
    assert outside > 30
    assert faults(DraftCase(d2t=ids, vocab_size=1000))[0] == ("d2t-absolute", "likely")


def test_a_wrong_entry_that_could_as_well_be_an_id_is_said_beside_it() -> None:
    d2t = spoilt(chosen(128_256, 64, 1), 20, 128_256)
    assert status(DraftCase(d2t=d2t, vocab_size=128_256), "d2t-offsets") == "warn"
