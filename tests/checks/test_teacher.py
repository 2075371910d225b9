"""Which fault of teacher logits is named, on teachers small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.checks import teacher
from opdtool.checks.faults_teacher import diagnose
from opdtool.checks.faults_teacher_sample import SAMPLE_COLUMNS, Proposal, Sample
from opdtool.checks.registry import faults
from opdtool.core.rebuild import RIGHT, Variant
from opdtool.findings import Diagnosis
from tests.checks.teacher_memory import Memory


def memory(
    B: int = 3,
    S: int = 8,
    H: int = 8,
    V: int = 32,
    teachers: int = 2,
    seed: int = 0,
    **rest: object,
) -> Memory:
    made = torch.Generator().manual_seed(seed)
    heads = {t: torch.randn(V, H, generator=made) for t in range(teachers)}
    return Memory(
        torch.randn(B, S, H, generator=made),
        heads,
        [b % teachers for b in range(B)],
        norms={t: 1 + 0.3 * torch.randn(H, generator=made) for t in heads},
        **rest,  # type: ignore[arg-type]
    )


def with_reference(case: Memory, *variants: Variant) -> Memory:
    """The case with what a fault, or several, made recorded; zeros where that is not judged."""
    made = RIGHT
    for variant in variants:
        made = made.also(variant)
    case.reference = case.make(made).nan_to_num(0.0)
    return case


def only(case: Memory) -> Diagnosis:
    (found,) = diagnose(case).diagnosis
    return found


SINGLE: list[tuple[str, Variant, str]] = [
    ("vocab-window-shifted", Variant(column_shift=3), "column j+3"),
    ("vocab-window-shifted", Variant(column_shift=-16), "-1 tensor-parallel ranks"),
    ("head-transposed", Variant(transposed=True), "hidden @ weight"),
    ("single-head-for-all", Variant(routes=(1, 1, 1)), "teacher 1"),
    ("teachers-misrouted", Variant(routes=(1, 0, 1)), "0 -> 1, 1 -> 0"),
    ("teachers-misrouted", Variant(routes=(0, 0, 1)), "row 1: 1 -> 0, row 2: 0 -> 1"),
    ("sequence-shifted", Variant(position_shift=2), "p+2"),
    ("sequence-shifted", Variant(position_shift=-1), "p-1"),
    ("logits-scaled", Variant(factor=1 / 0.7), "1.42857 times"),
    ("logits-scaled", Variant(factor=-2.0), "-2 times"),
    ("logits-softcapped", Variant(softcap=2.5), "a cap of 2.5"),
    ("log-probs-not-logits", Variant(log_probs=True), "log-probabilities"),
    ("norm-missing", Variant(norm="beside"), "pass --norm"),
    ("cp-contiguous", Variant(arrangement="contiguous"), "one contiguous piece"),
    ("cp-rank-swapped", Variant(cp_order=(1, 0)), "rank 0 holds rank 1's"),
]


@pytest.mark.parametrize(("fault", "variant", "said"), SINGLE)
def test_each_fault_is_exact_and_says_its_number(fault: str, variant: Variant, said: str) -> None:
    square = {"V": 16, "H": 16} if variant.transposed else {}
    case = memory(tp_size=2, cp_size=2 if fault.startswith("cp-") else 1, **square)
    with_reference(case, variant)
    assert case.facts.mismatches > 0
    found = only(case)
    assert (found.fault, found.match, found.faults, found.score) == (fault, "exact", (), None)
    assert said in found.message
    assert found.fix == faults()[fault].fix
    assert variant in [replace(tried, eps=0.0, slack=0.0) for tried in case.confirmed]


@pytest.mark.parametrize("junk", [0.0, 1.0, 1e30, -3.4e38, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("shift", [1, -16, 24])
def test_what_fell_off_the_edge_of_the_vocabulary_may_be_anything(shift: int, junk: float) -> None:
    case = memory(B=1, S=2, teachers=1)
    made = case.make(Variant(column_shift=shift))
    case.reference = torch.where(made.isnan(), junk, made)
    assert int(made.isnan().sum()) == 2 * abs(shift)
    found = only(case)
    assert (found.fault, found.match) == ("vocab-window-shifted", "exact")
    assert f"column j{shift:+d}" in found.message


def test_a_shift_that_leaves_fewer_than_eight_columns_has_no_name() -> None:
    case = with_reference(memory(B=1, S=2, teachers=1), Variant(column_shift=25))
    assert case.facts.mismatches > 0
    assert diagnose(case).diagnosis == ()


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ((1, 0), True),  # a rotation of two
        ((1, 2, 3, 0), True),
        ((2, 3, 0, 1), True),  # half of it, round the end
        ((2, 3, 1, 0), False),
        ((2, 1, 0), False),
        ((4, 5, 6, 7, 3, 2, 1, 0), False),
        ((4, 5, 6, 7, 0, 1, 2, 3), True),
    ],
)
def test_positions_in_another_order_are_no_shift_but_a_rotation_is(
    order: tuple[int, ...], named: bool
) -> None:
    case = memory(B=1, S=len(order), teachers=1)
    case.reference = case.make()[:, list(order)]
    assert [d.fault for d in diagnose(case).diagnosis] == (["sequence-shifted"] if named else [])


@pytest.mark.parametrize("junk", [0.0, 1e30, torch.nan])
def test_most_of_a_sequence_may_have_fallen_off_where_several_positions_are_left(
    junk: float,
) -> None:
    case = memory(B=2, S=12)
    made = case.make(Variant(position_shift=8))
    case.reference = torch.where(made.isnan(), junk, made)
    found = only(case)
    assert (found.fault, "p+8" in found.message) == ("sequence-shifted", True)


DRAFT = torch.tensor([30, 2, 17, 4, 9, 21, 11, 0, 25, 13, 6, 28, 15, 19, 8, 23])


@pytest.mark.parametrize(
    ("fault", "variant", "said"),
    [
        ("vocab-window-shifted", Variant(target_shift=3), "id t+3"),
        ("vocab-window-shifted", Variant(target_shift=16), "+1 tensor-parallel ranks"),
        ("vocab-window-shifted", Variant(column_shift=3), "column j+3"),
        (
            "log-probs-not-logits",
            Variant(log_probs=True, over_vocabulary=True),
            "over the whole vocabulary",
        ),
        ("log-probs-not-logits", Variant(log_probs=True), "log-sum-exp: log-prob"),
        ("logits-scaled", Variant(factor=3.0), "3 times"),
        ("teachers-misrouted", Variant(routes=(1, 0, 1)), "0 -> 1, 1 -> 0"),
    ],
)
def test_a_draft_map_may_cut_before_or_after_the_fault(
    fault: str, variant: Variant, said: str
) -> None:
    case = with_reference(memory(draft=DRAFT, tp_size=2), variant)
    found = only(case)
    assert (found.fault, found.match) == (fault, "exact")
    assert said in found.message


PAIRS: list[tuple[str, Variant, str, Variant]] = [
    ("teachers-misrouted", Variant(routes=(1, 0, 1)), "logits-scaled", Variant(factor=0.5)),
    ("logits-softcapped", Variant(softcap=2.5), "norm-missing", Variant(norm="beside")),
    (
        "vocab-window-shifted",
        Variant(column_shift=16),
        "sequence-shifted",
        Variant(position_shift=1),
    ),
    (
        "single-head-for-all",
        Variant(routes=(0, 0, 0)),
        "sequence-shifted",
        Variant(position_shift=-2),
    ),
    ("logits-scaled", Variant(factor=0.5), "log-probs-not-logits", Variant(log_probs=True)),
    ("cp-rank-swapped", Variant(cp_order=(1, 0)), "vocab-window-shifted", Variant(column_shift=4)),
]


@pytest.mark.parametrize(("one", "first", "other", "second"), PAIRS)
def test_two_faults_at_once_are_one_entry_that_names_both(
    one: str, first: Variant, other: str, second: Variant
) -> None:
    case = memory(cp_size=2 if one.startswith("cp-") else 1)
    with_reference(case, first, second)
    found = only(case)
    assert found.faults == (one, other)
    assert (found.fault, found.match, found.score) == (one, "exact", None)
    assert found.message.count("; and ") == 1
    assert faults()[one].fix in found.fix
    assert faults()[other].fix in found.fix
    assert len(case.confirmed) <= 12  # every one is a pass over the whole


def test_two_faults_of_which_one_changes_nothing_are_that_one() -> None:
    case = memory()
    case.states[:] = case.states[:, :1]  # all positions alike: a shift of them moves nothing
    with_reference(case, Variant(factor=2.0), Variant(position_shift=1))
    case.reference[:, -1] = case.reference[:, 0]
    found = only(case)
    assert (found.fault, found.faults) == ("logits-scaled", ())


def test_too_few_mismatches_are_no_two_faults() -> None:
    # Eight columns of two positions: a factor and a head that fit those are soon found.
    case = memory(B=1, S=2, V=8, teachers=2)
    case.routes = [0]
    with_reference(case, Variant(routes=(1,)), Variant(factor=0.5))
    assert case.facts.mismatches == 16
    assert diagnose(case).diagnosis == ()


def corruptions() -> dict[str, Callable[[Tensor], Tensor]]:
    made = torch.Generator().manual_seed(7)
    return {
        "noise": lambda x: x + torch.randn(x.shape, generator=made),
        "columns in another order": lambda x: x[..., torch.randperm(x.shape[2], generator=made)],
        "half of the positions scaled": lambda x: torch.cat([x[:, :4], 1.3 * x[:, 4:]], 1),
        "one column": lambda x: x + 2 * (torch.arange(x.shape[2]) == 5),
        "another teacher": lambda x: torch.randn(x.shape, generator=made),
        "all zero": torch.zeros_like,
        "all one": torch.ones_like,
        "all infinite": lambda x: torch.full_like(x, torch.inf),
        "all nan": lambda x: torch.full_like(x, torch.nan),
        "one value a position": lambda x: x[..., :1].expand_as(x).clone(),
    }


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        *((kind, RIGHT) for kind in corruptions()),
        ("noise", Variant(factor=0.5)),
        ("one column", Variant(column_shift=2)),
    ],
)
def test_what_no_fault_makes_has_no_exact_name(kind: str, beside: Variant) -> None:
    case = with_reference(memory(S=6, H=6, V=24), beside)
    case.reference = corruptions()[kind](case.reference)
    assert case.facts.mismatches > 0
    assert [d for d in diagnose(case).diagnosis if d.match == "exact"] == []


def test_a_fault_beside_a_stray_element_is_likely_by_its_share_and_never_exact() -> None:
    case = with_reference(memory(), Variant(factor=2.0))
    case.reference[1, 3, 7] += 5
    total = case.facts.mismatches
    found = only(case)
    assert (found.fault, found.match) == ("logits-scaled", "likely")
    assert found.score == pytest.approx(1 - 1 / total)


def test_a_fault_that_spoils_what_agrees_is_not_even_likely() -> None:
    case = with_reference(memory(), Variant(factor=2.0))
    case.reference[1, 3, 7] = case.make()[1, 3, 7]
    assert diagnose(case).diagnosis == ()


@pytest.mark.parametrize(
    ("made", "wanted", "remark"),
    [
        (Variant(uncapped=True), [], "without --logit-softcap all"),
        (Variant(uncapped=True, unscaled=True), [], "--logit-scale and --logit-softcap all"),
        (Variant(unscaled=True), ["logits-scaled"], ""),
        (Variant(uncapped=True, softcap=4.0), ["logits-softcapped"], ""),
    ],
)
def test_a_cap_that_was_asked_for_and_left_out_is_a_remark_and_no_fault(
    made: Variant, wanted: list[str], remark: str
) -> None:
    case = with_reference(memory(scale=0.5, softcap=2.0), made)
    verdict = diagnose(case)
    assert [d.fault for d in verdict.diagnosis] == wanted
    assert remark in verdict.remark
    assert bool(verdict.remark) is bool(remark)


def test_a_payload_that_is_normed_already_is_not_missing_its_norm() -> None:
    case = memory()
    for b, head in enumerate(case.routes):
        x = case.states[b]
        case.states[b] = x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * case.norms[head]
    with_reference(case, Variant(norm="beside"))
    assert only(case).fault == "norm-applied-twice"
    asked = with_reference(replace(case, normed=True), Variant(norm="none"))
    found = only(asked)
    assert (found.fault, "--norm norms it again" in found.message) == ("norm-applied-twice", True)


@pytest.mark.parametrize("pad", [0.0, -torch.inf, -1e4, torch.nan])
def test_last_columns_that_all_hold_one_value_pad_the_vocabulary(pad: float) -> None:
    case = with_reference(memory())
    case.reference[..., -5:] = pad
    found = only(case)
    assert (found.fault, "columns 27..31" in found.message) == ("vocab-padded", True)


def test_a_property_is_named_alone_where_all_agrees_and_beside_a_fault_where_not() -> None:
    for rest, fault in (({"uneven": True}, "tp-shards-uneven"), ({"wider": 16}, "vocab-padded")):
        case = with_reference(memory(**rest))
        assert case.facts.mismatches == 0
        assert only(case).fault == fault
        found = only(with_reference(case, Variant(factor=2.0)))
        assert set(found.faults) == {"logits-scaled", fault}
        assert found.fault == found.faults[0]
        assert list(faults()).index(found.faults[0]) < list(faults()).index(found.faults[1])


def test_a_reference_of_less_precision_is_rounding_only_and_an_equal_one_is_nothing() -> None:
    case = with_reference(memory(coarser=True))
    assert diagnose(case).diagnosis == ()
    case.reference = case.reference + 1e-5
    assert only(case).fault == "rounding-only"


def test_of_a_large_vocabulary_some_columns_are_sampled_edges_and_mismatches_among_them() -> None:
    case = with_reference(memory(B=1, S=1, V=600, teachers=1))
    case.reference[0, 0, 301] += 5
    sample = Sample(case)
    assert SAMPLE_COLUMNS < len(sample.columns) < SAMPLE_COLUMNS + 20
    assert {0, 599, 301} <= set(sample.columns.tolist())
    assert sample.columns[sample.wrong[0].numpy()].tolist() == [301]


def test_the_sample_refuses_a_fault_that_explains_too_little_or_spoils_anything() -> None:
    case = with_reference(memory(), Variant(factor=2.0))
    sample = Sample(case)
    assert sample.screens(Proposal("", Variant(factor=2.0), ""))
    assert not sample.screens(Proposal("", Variant(factor=2.1), ""))
    assert not sample.screens(Proposal("", Variant(columns=1), "", leaves_out=True))
    case.reference[0, 0, 0] += 1  # one of more than a hundred
    sample = Sample(case)
    assert sample.screens(Proposal("", Variant(factor=2.0), ""))
    assert not sample.screens(Proposal("", Variant(factor=2.0), ""), whole=True)


def test_departures_of_two_variants_are_put_together_and_what_moves_columns_is_not_summed() -> None:
    both = Variant(factor=2.0).also(Variant(column_shift=3, log_probs=True))
    assert both == Variant(factor=2.0, column_shift=3, log_probs=True)
    assert both.also(RIGHT) == both
    assert both.summed == Variant(factor=2.0)


def test_a_finding_counts_and_places_what_it_says() -> None:
    place = {"sequence": 0, "position": 1, "column": 2}
    bad = teacher.logits_finite("t", 10, 2, -1.0, 1.0, [place] * 20)
    assert (bad.status, bad.mismatches, bad.total, len(bad.first)) == ("fail", 2, 10, 10)
    assert teacher.logits_finite("t", 10, 0, -1.0, 1.0, []).status == "pass"
    match = teacher.logits_match("t", 10, 3, 7.5, "|a-ref| <= 1", [place])
    assert (match.status, match.mismatches, match.first) == ("fail", 3, (place,))
    assert "7.5 times" in match.message
    assert teacher.logits_match("t", 10, 0, 0.5, "|a-ref| <= 1", []).status == "pass"
    changed = teacher.head_identity(["the head of teacher 1 is another"], 2)
    assert (changed.status, changed.mismatches, changed.total) == ("fail", 1, 2)
    assert teacher.head_identity([], 2).status == "pass"
    assert teacher.divergence_finite("s", 5, 1, [place]).status == "fail"
    assert teacher.divergence_finite("s", 5, 0, []).status == "pass"


@pytest.mark.parametrize(
    ("widths", "expected", "also", "status"),
    [
        ([32], 32, None, "pass"),
        ([16, 16], 32, None, "pass"),
        ([16, 17], 33, None, "fail"),
        ([30], 32, None, "fail"),
        ([30], 32, 30, "pass"),
        ([48], 32, None, "fail"),
    ],
)
def test_columns_of_a_reference_are_those_rebuilt_in_equal_shards(
    widths: list[int], expected: int, also: int | None, status: str
) -> None:
    found = teacher.reference_columns("t", widths, expected, also=also)
    assert (found.code, found.status) == ("OPD502", status)
    assert np.sum(widths) > 0


def test_columns_of_one_side_alone_are_padding_where_that_is_proven() -> None:
    proven = only(with_reference(memory(wider=6)))
    assert (proven.fault, proven.match) == ("vocab-padded", "exact")
    likely = only(with_reference(memory(wider=6, padding=False)))
    assert (likely.fault, likely.match, likely.score) == ("vocab-padded", "likely", 1.0)
    assert "may pad the vocabulary" in likely.message
    # As many again are no padding, but another vocabulary or other shards.
    assert diagnose(with_reference(memory(wider=32, padding=False))).diagnosis == ()
    assert only(with_reference(memory(wider=32))).match == "exact"
    beside = with_reference(memory(wider=6, padding=False), Variant(factor=2.0))
    assert [(found.fault, found.faults) for found in diagnose(beside).diagnosis] == [
        ("logits-scaled", ())
    ]


def test_to_agree_within_a_given_tolerance_says_nothing_of_rounding() -> None:
    case = with_reference(memory(coarser=True, given=True))
    case.reference = case.reference + 1e-5
    assert diagnose(case).diagnosis == ()
