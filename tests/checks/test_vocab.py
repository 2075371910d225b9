"""The draft vocabulary's checks: every known fault is named, and right maps pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opdtool.checks.registry import checks, faults
from opdtool.checks.texts.vocab import CHECKS, FAULTS
from opdtool.checks.vocab_case import DraftCase
from opdtool.checks.vocab_faults import judge_draft_vocab
from opdtool.core.errors import InputError
from opdtool.findings import Diagnosis, Finding, Status


def right_case(vocab: int, size: int, seed: int) -> DraftCase:
    """A correct map of ``size`` of ``vocab`` random ids, ascending, with all that goes with it.

    Id 0 is left out, so that all-zero is wrong, and two neighbours are in, so that the offsets
    cannot be ids.
    """
    rng = torch.Generator().manual_seed(seed)
    ids = (torch.randperm(vocab - 1, generator=rng)[:size] + 1).sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return DraftCase(
        d2t=torch.tensor([int(target) - i for i, target in enumerate(ids.tolist())]),
        t2d=t2d,
        vocab_size=vocab,
        draft_vocab_size=size,
        head_rows=size,
        against=ids,
        must_include=(int(ids[0]), int(ids[-1])),
    )


def by_frequency(vocab: int, size: int, seed: int) -> DraftCase:
    """A correct map in no order, without a t2d."""
    case = right_case(vocab, size, seed)
    assert case.against is not None
    rng = torch.Generator().manual_seed(seed + 1)
    ids = case.against[torch.randperm(size, generator=rng)]
    d2t = torch.tensor([int(target) - i for i, target in enumerate(ids.tolist())])
    return replace(case, d2t=d2t, t2d=None, against=None)


def names(diagnosis: list[Diagnosis]) -> list[str]:
    return [each.fault for each in diagnosis]


def statuses(findings: list[Finding]) -> dict[str, Status]:
    return {each.name: each.status for each in findings}


def failed(findings: list[Finding]) -> set[str]:
    return {each.name for each in findings if each.status == "fail"}


SIZES = st.sampled_from(
    [
        (8, 3),
        (40, 16),
        (320, 32),
        (1000, 900),
        (32_000, 8_000),
        (151_936, 32_000),
        (262_144, 262_000),
    ]
)
SEEDS = st.integers(0, 2**31)


@settings(max_examples=25, deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_right_maps_of_both_conventions_pass_and_nothing_is_diagnosed(
    size: tuple[int, int], seed: int
) -> None:
    for case in (right_case(*size, seed), by_frequency(*size, seed)):
        for kept in (case, replace(case, against=None), replace(case, vocab_size=None)):
            findings, diagnosis = judge_draft_vocab(kept)
            assert failed(findings) == set()
            assert diagnosis == []
            assert [each.code for each in findings] == [f"OPD{n}" for n in range(401, 417)]


def with_entry(case: DraftCase, draft_id: int, target: int) -> DraftCase:
    d2t = case.d2t.clone()
    d2t[draft_id] = target - draft_id
    return replace(case, d2t=d2t)


def absolute(case: DraftCase) -> DraftCase:
    return replace(case, d2t=case.ids.clone())


def alone(case: DraftCase) -> DraftCase:
    """Only the map and its sizes: nothing that proves it."""
    return replace(case, t2d=None, against=None, must_include=(), head_rows=None)


def swapped(case: DraftCase) -> DraftCase:
    ids = case.ids.clone()
    ids[[0, 1]] = ids[[1, 0]]
    return replace(case, d2t=ids - torch.arange(len(ids)), against=ids)


def free_id(case: DraftCase) -> int:
    assert case.t2d is not None
    return int((~case.t2d).nonzero()[-1])


def unmarked(case: DraftCase, target: int) -> DraftCase:
    assert case.t2d is not None
    t2d = case.t2d.clone()
    t2d[target] = False
    return replace(case, t2d=t2d)


# What is done to a right case, the faults that must be named (in order), the checks that fail.
FAULTY: dict[str, tuple[Callable[[DraftCase], DraftCase], list[str], set[str]]] = {
    "all zero": (
        lambda case: alone(replace(case, d2t=torch.zeros_like(case.d2t))),
        ["d2t-all-zero"],
        {"d2t-offsets"},
    ),
    "negative": (
        lambda case: with_entry(alone(case), 1, -3),
        ["d2t-out-of-range"],
        {"d2t-range"},
    ),
    "past the end": (
        lambda case: with_entry(alone(case), case.entries - 1, 3 * case.vocab_size),  # type: ignore[operator]
        ["d2t-out-of-range"],
        {"d2t-range"},
    ),
    "duplicate": (
        lambda case: with_entry(alone(case), 1, int(case.ids[0])),
        ["d2t-duplicate-targets"],
        {"d2t-unique"},
    ),
    "too long": (
        lambda case: replace(alone(case), draft_vocab_size=case.entries - 1),
        ["d2t-length"],
        {"d2t-length"},
    ),
    "t2d misses one": (
        lambda case: unmarked(case, int(case.ids[1])),
        ["t2d-mismatch"],
        {"t2d-count", "t2d-agreement"},
    ),
    "t2d of another vocabulary": (
        lambda case: replace(case, t2d=torch.cat([case.t2d, torch.zeros(5, dtype=torch.bool)])),  # type: ignore[list-item]
        ["t2d-mismatch"],
        {"t2d-dtype"},
    ),
    "t2d index map": (
        lambda case: replace(case, t2d=torch.arange(case.targets or 0)),
        ["t2d-not-boolean"],
        {"t2d-dtype"},
    ),
    "t2d of numbers": (
        lambda case: replace(case, t2d=case.t2d.to(torch.uint8)),  # type: ignore[union-attr]
        ["t2d-not-boolean"],
        {"t2d-dtype"},
    ),
    "order": (swapped, ["d2t-order-with-t2d"], {"d2t-order"}),
    "special": (
        lambda case: replace(case, must_include=(*case.must_include, free_id(case))),
        ["special-token-missing"],
        {"special-tokens"},
    ),
    "head": (
        lambda case: replace(case, head_rows=case.entries + 1),
        ["draft-head-rows"],
        {"draft-head-rows"},
    ),
    "not divisible": (
        lambda case: replace(case, tp=case.entries + 1),
        ["d2t-not-divisible"],
        {"draft-divisible"},
    ),
    "stale": (
        lambda case: replace(case, against=case.ids.flip(0)),
        ["stale-map"],
        {"same-map"},
    ),
}


@pytest.mark.parametrize("name", FAULTY)
@settings(max_examples=10, deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_each_fault_is_named_and_no_other_is(name: str, size: tuple[int, int], seed: int) -> None:
    spoil, expected, failing = FAULTY[name]
    case = right_case(*size, seed)
    assert failed(judge_draft_vocab(case)[0]) == set()
    findings, diagnosis = judge_draft_vocab(spoil(case))
    assert names(diagnosis) == expected
    assert failed(findings) == failing
    assert all(each.match == "exact" for each in diagnosis)


@settings(max_examples=20, deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_ids_for_offsets_are_the_root_cause_and_exact_where_t2d_or_another_map_proves_it(
    size: tuple[int, int], seed: int
) -> None:
    case = right_case(*size, seed)
    for proof in (case, replace(case, against=None), replace(case, t2d=None)):
        findings, diagnosis = judge_draft_vocab(absolute(proof))
        assert diagnosis[0].fault == "d2t-absolute"
        assert diagnosis[0].match == "exact"
        assert set(names(diagnosis)[1:]) <= {
            "d2t-out-of-range",
            "t2d-mismatch",
            "special-token-missing",
            "stale-map",
        }
        assert "d2t-offsets" in failed(findings)


@settings(max_examples=20, deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_ids_for_offsets_are_likely_where_only_the_range_speaks_of_it(
    size: tuple[int, int], seed: int
) -> None:
    case = absolute(alone(right_case(*size, seed)))
    assert case.targets is not None
    case = replace(case, vocab_size=int(case.offsets.max()) + 1)
    findings, diagnosis = judge_draft_vocab(case)
    assert names(diagnosis) == ["d2t-absolute", "d2t-out-of-range"]
    assert diagnosis[0].match == "likely"
    assert diagnosis[0].score == 1.0
    assert failed(findings) == {"d2t-offsets", "d2t-range"}


def test_ids_for_offsets_are_likely_where_required_ids_are_missing_as_offsets_alone() -> None:
    case = DraftCase(d2t=torch.tensor([2, 5, 9]), vocab_size=100, must_include=(9,))
    diagnosis = judge_draft_vocab(case)[1]
    assert names(diagnosis) == ["d2t-absolute", "special-token-missing"]
    assert diagnosis[0].match == "likely"


def test_ids_that_nearly_all_are_marked_are_likely_with_their_share() -> None:
    ids = torch.arange(0, 800, 2)
    t2d = torch.zeros(800, dtype=torch.bool)
    t2d[ids] = True
    t2d[798] = False
    t2d[799] = True
    found = judge_draft_vocab(DraftCase(d2t=ids, t2d=t2d))[1]
    assert found[0].fault == "d2t-absolute"
    assert (found[0].match, found[0].score) == ("likely", 399 / 400)


def test_a_map_of_offsets_that_could_be_ids_only_warns() -> None:
    offsets = 2 * torch.arange(300)  # every third id: right, though offsets rise as ids do
    findings, diagnosis = judge_draft_vocab(DraftCase(d2t=offsets, vocab_size=1000))
    assert diagnosis == []
    assert statuses(findings)["d2t-offsets"] == "warn"
    t2d = torch.zeros(1000, dtype=torch.bool)
    t2d[3 * torch.arange(300)] = True
    proven = judge_draft_vocab(DraftCase(d2t=offsets, vocab_size=1000, t2d=t2d))[0]
    assert statuses(proven)["d2t-offsets"] == "pass"


def marks(vocab: int, ids: Tensor) -> Tensor:
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return t2d


@pytest.mark.parametrize("size", [2, 5, 1000])
def test_arange_is_named_before_absolute(size: int) -> None:
    d2t = torch.arange(size)
    vocab = 4 * size
    assert names(judge_draft_vocab(DraftCase(d2t=d2t, vocab_size=vocab))[1]) == ["d2t-arange"]
    first = DraftCase(d2t=d2t, t2d=marks(vocab, torch.arange(size)))
    assert names(judge_draft_vocab(first)[1]) == ["d2t-arange", "d2t-absolute", "t2d-mismatch"]
    even = DraftCase(d2t=d2t, t2d=marks(vocab, 2 * torch.arange(size)))
    assert judge_draft_vocab(even)[1] == []


def test_all_zero_is_right_only_for_the_whole_vocabulary_or_a_t2d_of_the_first_ids() -> None:
    zeros = torch.zeros(4, dtype=torch.int64)
    assert judge_draft_vocab(DraftCase(d2t=zeros, vocab_size=4))[1] == []
    assert judge_draft_vocab(DraftCase(d2t=zeros, t2d=marks(9, torch.arange(4))))[1] == []
    assert names(judge_draft_vocab(DraftCase(d2t=zeros, vocab_size=9))[1]) == ["d2t-all-zero"]
    assert names(judge_draft_vocab(DraftCase(d2t=zeros))[1]) == ["d2t-all-zero"]
    other = DraftCase(d2t=zeros, t2d=marks(9, torch.tensor([0, 1, 2, 4])))
    assert names(judge_draft_vocab(other)[1]) == ["d2t-all-zero", "t2d-mismatch"]


def test_an_identity_map_is_said_and_not_failed() -> None:
    findings = judge_draft_vocab(
        DraftCase(d2t=torch.zeros(4, dtype=torch.int64), vocab_size=4, draft_vocab_size=4)
    )[0]
    identity = next(each for each in findings if each.name == "identity-map")
    assert identity.status == "pass"
    assert identity.message.startswith("identity: the draft has all 4 target ids")
    shuffled = judge_draft_vocab(DraftCase(d2t=torch.tensor([1, -1, 0, 0]), vocab_size=4))[0]
    assert statuses(shuffled)["identity-map"] == "warn"
    assert failed(shuffled) == set()


def test_order_by_frequency_is_reported_and_not_failed() -> None:
    findings = judge_draft_vocab(by_frequency(1000, 100, 1))[0]
    order = next(each for each in findings if each.name == "d2t-order")
    assert order.status == "pass"
    assert "do not ascend" in order.message


def test_mismatches_are_counted_and_the_first_ten_are_placed() -> None:
    case = right_case(1000, 100, 3)
    spoilt = replace(case, d2t=torch.where(torch.arange(100) >= 80, 5000, case.d2t))
    ranged = next(f for f in judge_draft_vocab(spoilt)[0] if f.name == "d2t-range")
    assert (ranged.mismatches, ranged.total, len(ranged.first)) == (20, 100, 10)
    assert ranged.first[0] == {"draft_id": 80, "offset": 5000, "target_id": 5080}
    assert "draft id 80 stands for 80 + 5000 = 5080" in ranged.message


def test_t2d_and_d2t_are_compared_both_ways() -> None:
    case = DraftCase(d2t=torch.tensor([1, 1]), t2d=marks(6, torch.tensor([1, 4])))
    agreement = next(f for f in judge_draft_vocab(case)[0] if f.name == "t2d-agreement")
    assert agreement.mismatches == 2
    assert agreement.first == (
        {"target_id": 2, "expected": True, "actual": False},
        {"target_id": 4, "expected": False, "actual": True},
    )


def test_a_map_of_another_dtype_is_told_apart() -> None:
    case = right_case(40, 16, 1)
    for dtype, status in ((torch.int32, "warn"), (torch.int64, "pass"), (torch.float32, "fail")):
        found = statuses(judge_draft_vocab(replace(case, d2t=case.d2t.to(dtype)))[0])
        assert found["d2t-dtype"] == status
        assert found["d2t-range"] == "pass"


def test_vocabularies_that_do_not_divide_are_said_with_their_remainders() -> None:
    case = DraftCase(d2t=torch.tensor([1, 1, 2]), vocab_size=9, tp=2)
    findings, diagnosis = judge_draft_vocab(case)
    said = {each.name: each for each in findings}
    assert said["draft-divisible"].status == "fail"
    assert "1 left over" in said["draft-divisible"].message
    assert said["vocab-divisible"].status == "warn"
    assert "padded" not in said["draft-divisible"].message
    assert "to 10 columns" in said["vocab-divisible"].message
    assert names(diagnosis) == ["d2t-not-divisible"]


def test_a_target_vocabulary_that_alone_does_not_divide_is_refused() -> None:
    d2t = torch.tensor([1, 1])
    with pytest.raises(InputError, match=r"9 ids does not divide by --tp 2: 1 left over"):
        DraftCase(d2t=d2t, vocab_size=9, tp=2)
    with pytest.raises(InputError, match=r"9 ids, padded to 11, does not divide by --tp 2"):
        DraftCase(d2t=d2t, vocab_size=9, tp=2, pad_multiple=11)
    padded = DraftCase(d2t=d2t, vocab_size=9, tp=2, pad_multiple=4)
    found = next(f for f in judge_draft_vocab(padded)[0] if f.name == "vocab-divisible")
    assert (found.status, found.message) == ("pass", "12 target ids with padding are 6 a rank")


def test_a_missing_end_of_text_id_only_warns() -> None:
    case = DraftCase(d2t=torch.tensor([1, 1]), vocab_size=9, end_ids=(1, 7))
    special = next(f for f in judge_draft_vocab(case)[0] if f.name == "special-tokens")
    assert special.status == "warn"
    assert "7" in special.message


def test_ids_past_the_tokenizer_are_warned_of() -> None:
    case = DraftCase(d2t=torch.tensor([1, 1, 5]), vocab_size=9, tokenizer_size=6)
    found = next(f for f in judge_draft_vocab(case)[0] if f.name == "tokenizer-ids")
    assert (found.status, found.mismatches) == ("warn", 1)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
def test_the_extremes_of_int64_are_out_of_range(value: int) -> None:
    diagnosis = judge_draft_vocab(DraftCase(d2t=torch.tensor([1, value, 5]), vocab_size=9))[1]
    assert names(diagnosis) == ["d2t-out-of-range"]


def test_what_is_no_map_at_all_is_refused() -> None:
    for d2t, said in (
        (torch.zeros(2, 2, dtype=torch.int64), r"d2t has shape \[2, 2\]"),
        (torch.zeros(0, dtype=torch.int64), r"d2t has shape \[0\]"),
        (torch.zeros(2, dtype=torch.complex64), "d2t is torch.complex64"),
    ):
        with pytest.raises(InputError, match=said):
            DraftCase(d2t=d2t)
    with pytest.raises(InputError, match=r"t2d has shape \[2, 2\]"):
        DraftCase(d2t=torch.tensor([0]), t2d=torch.zeros(2, 2, dtype=torch.bool))
    with pytest.raises(InputError, match="vocabulary size is 0"):
        DraftCase(d2t=torch.tensor([0]), vocab_size=0)


def test_every_check_and_fault_is_registered_under_its_hundred() -> None:
    assert len(CHECKS) == 18
    assert [info.code for info in CHECKS] == [f"OPD{n}" for n in range(401, 419)]
    assert {info.code for info in CHECKS} <= set(checks())
    assert {info.name for info in FAULTS} == {
        *("d2t-absolute", "d2t-all-zero", "d2t-arange", "d2t-out-of-range", "d2t-length"),
        *("d2t-duplicate-targets", "t2d-mismatch", "t2d-not-boolean", "d2t-order-with-t2d"),
        *("d2t-not-divisible", "special-token-missing", "draft-head-rows", "stale-map"),
    }
    assert all(info.name in faults() for info in FAULTS)
