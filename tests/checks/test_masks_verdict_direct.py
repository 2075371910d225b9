"""One pack's mask judged, and the findings and diagnoses of many put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.checks import masks_verdict as module
from opdtool.checks.hypotheses import MaskWeights
from opdtool.checks.layout_outcome import LayoutOutcome
from opdtool.checks.masks_verdict import (
    Checked,
    DumpedMask,
    check_pack,
    diagnose_all,
    merge_findings,
    property_diagnosis,
)
from opdtool.checks.recipes_values import Cells, as_numbers
from opdtool.checks.registry import faults
from opdtool.core.geometry import PackGeometry
from opdtool.findings import MAX_PLACES, Diagnosis, Finding, Match, Status
from tests.checks.judging import MemoryBatch

RIGHT = [1.0, 1, 0, 0, 1, 0, 0, 0]
"""Rows of 3 and 2 tokens in 4 slots each, all trained."""


def judged(
    values: Sequence[float],
    *,
    cu: Sequence[int] = (0, 3, 5),
    padded: Sequence[int] = (0, 4, 8),
    ranks: int = 1,
    cp: int = 1,
    pad: int = 4,
    sizes: Sequence[int] | None = None,
    whole: bool = False,
    **more: Any,
) -> Checked:
    mask = torch.ones(2, 4)
    batch = MemoryBatch({"token_mask": mask}, np.array([3, 2]), 4)
    weights = MaskWeights(
        tokens=Cells(batch=batch, name="token_mask", width=4, decode=as_numbers),
        sample=np.ones(2),
    )
    sizes = sizes or [len(values) // ranks] * ranks
    ends = np.cumsum(sizes).tolist()
    shards = [torch.tensor(values)[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    dumped = DumpedMask(
        name="step 3",
        tensor="draft_token_mask",
        pieces=[lambda a, b, shard=shard: shard[a:b] for shard in shards],  # type: ignore[misc]
        sizes=sizes,
        vectors={
            "cu_seqlens": torch.tensor(cu),
            "cu_seqlens_padded": torch.tensor(padded),
            "sequence_index": None,
        },
        whole=whole,
        **more,
    )
    return check_pack(dumped, batch, weights, PackGeometry(cp_size=cp, pad_multiple=pad))


def status_of(checked: Checked, code: str) -> list[Status]:
    return [f.status for f in checked.outcome.findings if f.code == code]


def test_a_right_pack_is_judged_with_its_name_and_what_was_found_on_the_way() -> None:
    known = finding("OPD303", "warn")
    checked = judged(RIGHT, known=[known])
    assert checked.name == "step 3"
    assert checked.pack is not None
    assert checked.pack.name == "step 3"
    assert checked.pack.case.mismatches == 0
    assert (checked.pack.case.shift, checked.pack.case.atol) == (1, 0.0)
    assert known in checked.outcome.findings
    assert {f.status for f in checked.outcome.findings} == {"pass", "warn", "skip"} - {"skip"}


def test_shift_and_tolerance_are_the_dumps() -> None:
    checked = judged([1, 1, 1, 0, 1, 1, 0, 0.25], shift=0, atol=0.25)
    assert checked.pack is not None
    assert checked.pack.case.mismatches == 0
    assert judged([1, 1, 1, 0, 1, 1, 0, 0.25], shift=0, atol=0.2).pack.case.mismatches == 1  # type: ignore[union-attr]


def test_a_dump_is_whole_where_it_says_so_or_where_one_rank_holds_it_all() -> None:
    zigzag = [1.0, 0, 1, 0, 1, 0, 0, 0]
    cases = [
        (judged(RIGHT, whole=False, cp=1), True),
        (judged(RIGHT, whole=True, cp=2), True),
        (judged(zigzag, whole=False, cp=2, ranks=2), False),
    ]
    for checked, whole in cases:
        assert checked.pack is not None
        assert checked.pack.case.whole is whole
        assert checked.pack.case.mismatches == 0


def test_ranks_of_different_sizes_end_the_judgement() -> None:
    checked = judged(RIGHT, cp=2, sizes=[5, 3])
    assert checked.pack is None
    assert checked.outcome.layout is None
    failed = [f for f in checked.outcome.findings if f.code == "OPD302"]
    assert [f.status for f in failed] == ["fail"]
    assert failed[0].message == "the ranks hold 5, 3 slots; expected the same on each"
    assert failed[0].tensor == "draft_token_mask"


def test_lost_lengths_warn_while_the_mask_is_right_and_fail_where_it_is_not() -> None:
    lost = (0, 4, 8)
    assert status_of(judged(RIGHT, cu=lost), "OPD108") == ["warn"]
    wrong = judged([1.0, 1, 1, 0, 1, 0, 0, 0], cu=lost)
    assert wrong.pack is not None
    assert wrong.pack.case.mismatches == 1
    assert status_of(wrong, "OPD108") == ["fail"]


def finding(code: str, status: Status, message: str = "said", **more: Any) -> Finding:
    return Finding(code=code, name="mask-values", status=status, message=message, **more)


def test_findings_of_one_pack_stay_as_they_are() -> None:
    one = [
        finding("OPD301", "fail", mismatches=3, first=({"slot": 1},)),
        finding("OPD304", "pass"),
    ]
    assert merge_findings([("only", one)]) == one
    assert merge_findings([]) == []


def test_of_many_packs_the_worst_finding_speaks_with_its_packs_name() -> None:
    merged = merge_findings(
        [
            ("a", [finding("OPD301", "warn", "odd", tensor="m", first=({"slot": 4},))]),
            (
                "b",
                [finding("OPD301", "fail", "bad", tensor="m", mismatches=2, first=({"slot": 1},))],
            ),
            ("c", [finding("OPD301", "warn", "odd", tensor="m", mismatches=50)]),
            (
                "d",
                [finding("OPD301", "fail", "too", tensor="m", mismatches=3, first=({"slot": 7},))],
            ),
            ("e", [finding("OPD301", "fail", "as well", tensor="m", first=({"slot": 9},))]),
        ]
    )
    assert len(merged) == 1
    assert merged[0].status == "fail"
    assert merged[0].message == "b: bad (and 2 more packs)"
    assert merged[0].mismatches == 5
    assert merged[0].first == (
        {"pack": "b", "slot": 1},
        {"pack": "d", "slot": 7},
        {"pack": "e", "slot": 9},
    )


def test_one_failing_pack_of_many_is_named_alone_and_warnings_are_too() -> None:
    merged = merge_findings([("a", [finding("X", "pass")]), ("b", [finding("X", "warn", "odd")])])
    assert [(f.status, f.message, f.mismatches) for f in merged] == [("warn", "b: odd", None)]
    merged = merge_findings([("a", [finding("X", "fail", "one")]), ("b", [finding("X", "skip")])])
    assert [f.message for f in merged] == ["a: one"]
    merged = merge_findings([(name, [finding("X", "fail", "bad")]) for name in "ab"])
    assert merged[0].message.startswith("a: bad (and 1 more")


def test_where_all_packs_pass_the_first_says_so_unnamed_and_skips_give_way() -> None:
    merged = merge_findings(
        [
            ("a", [finding("OPD301", "skip", "not here"), finding("OPD302", "skip", "no")]),
            ("b", [finding("OPD301", "pass", "fine"), finding("OPD302", "skip", "nor here")]),
        ]
    )
    assert [f.message for f in merged] == ["fine", "no"]


def test_checks_and_tensors_are_merged_apart_in_the_order_in_which_they_come() -> None:
    merged = merge_findings(
        [
            ("a", [finding("X", "pass", tensor="one"), finding("X", "pass", tensor="two")]),
            ("b", [finding("Y", "pass"), finding("X", "fail", "bad", tensor="two")]),
        ]
    )
    told = [(f.code, f.tensor, f.status) for f in merged]
    assert told == [("X", "one", "pass"), ("X", "two", "fail"), ("Y", None, "pass")]


def test_no_more_places_are_kept_than_shown() -> None:
    places = tuple({"slot": i} for i in range(MAX_PLACES))
    merged = merge_findings([(name, [finding("X", "fail", first=places)]) for name in "ab"])
    assert len(merged[0].first) == MAX_PLACES
    assert {place["pack"] for place in merged[0].first} == {"a"}


def test_a_proven_fault_is_told_in_the_registrys_words_with_what_was_found() -> None:
    name = "cu-seqlens-swapped"
    info = faults()[name]
    made = property_diagnosis(name, "as found")
    assert (made.fault, made.match, made.fix) == (name, "exact", info.fix)
    assert made.message == f"{info.statement} (as found)"
    assert property_diagnosis(name, "").message == info.statement


def outcome(**more: Any) -> LayoutOutcome:
    none = np.zeros(0, dtype=np.int64)
    return LayoutOutcome(rows=none, lengths=none, **more)


def said(fault: str, match: Match = "exact", faults: tuple[str, ...] = ()) -> Diagnosis:
    return Diagnosis(fault=fault, match=match, message="", fix="", faults=faults)


def ranked(
    monkeypatch: pytest.MonkeyPatch, outcomes: Sequence[LayoutOutcome], found: Sequence[Diagnosis]
) -> list[tuple[str, str]]:
    monkeypatch.setattr(module, "diagnose", lambda cases, forms: tuple(found))
    checked = [Checked(name="", outcome=entry, pack=None) for entry in outcomes]
    diagnosed = diagnose_all(checked, 1)
    return [("+".join(entry.faults) or entry.fault, entry.match) for entry in diagnosed]


def test_exact_faults_come_before_likely_ones_and_hinted_ones_before_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        said("mask-not-shifted", "likely"),
        said("mask-inverted"),
        said("tail-not-clamped"),
        said("mask-shifted-twice"),
        said("laid-out-unpadded", "likely"),
    ]
    order = ranked(monkeypatch, [outcome(suspects={"tail-not-clamped"}), outcome()], found)
    assert order == [
        ("tail-not-clamped", "exact"),
        ("mask-shifted-twice", "exact"),
        ("mask-inverted", "exact"),
        ("mask-not-shifted", "likely"),
        ("laid-out-unpadded", "likely"),
    ]


def test_a_fault_that_the_offsets_prove_is_named_once_and_first_with_its_first_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "lengths-off-by-one"
    outcomes = [outcome(), outcome(faults={name: "one"}), outcome(faults={name: "two"})]
    found = [said("mask-inverted"), said(name)]
    order = ranked(monkeypatch, outcomes, found)
    assert order == [(name, "exact"), ("mask-inverted", "exact")]
    first = diagnose_all([Checked(name="", outcome=o, pack=None) for o in outcomes], 1)[0]
    assert first.message == f"{faults()[name].statement} (one)"


def test_a_pair_is_kept_beside_the_proven_fault_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, other = "lengths-off-by-one", "mask-inverted"
    pair = said(other, faults=(other, name))
    also = said(name, faults=(name, "cp-contiguous"))
    order = ranked(
        monkeypatch, [outcome(faults={name: ""})], [said("mask-shifted-twice"), pair, also]
    )
    assert order == [
        ("mask-inverted+lengths-off-by-one", "exact"),
        (name, "exact"),
        ("lengths-off-by-one+cp-contiguous", "exact"),
        ("mask-shifted-twice", "exact"),
    ]


def test_the_masks_of_packs_that_could_be_judged_are_diagnosed_together() -> None:
    wrong = judged([1.0, 1, 1, 0, 1, 1, 0, 0])  # each row's last slot trained
    uneven = judged(RIGHT, cp=2, sizes=[5, 3])
    assert wrong.pack is not None
    assert uneven.pack is None
    named = [entry.fault for entry in diagnose_all([uneven, wrong], 1)]
    assert named[0] == "mask-not-shifted"  # with all tokens trained, the same mask
    assert "mask-last-slot-kept" in named
    assert diagnose_all([judged(RIGHT)], 1) == ()
    right_when_unshifted = judged([1.0, 1, 1, 0, 1, 1, 0, 0], shift=0)
    assert diagnose_all([right_when_unshifted], 0) == ()
