"""Two faults of teacher logits at once are named together; two that are not known never are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opdtool.checks.registry import faults
from opdtool.jobs.reconstruct.run import run
from tests.cli.teacher_cases import Case, Recorded, make_case, shards, write, zigzag

Step = Callable[[Case, Tensor], Tensor]


def swapped(case: Case) -> Tensor:
    low, high = sorted(case.heads)
    return torch.where(case.index == low, high, low)


def single(case: Case) -> Tensor:
    return torch.full_like(case.index, max(case.heads))


def at_once(case: Case, wrong: Sequence[str]) -> Recorded | None:
    """What is recorded with all of ``wrong`` done, in the order in which a trainer does them."""
    routes = case.index
    if "teachers-misrouted" in wrong or "single-head-for-all" in wrong:
        if case.B == 1:
            return None
        routes = swapped(case) if "teachers-misrouted" in wrong else single(case)
    # A head comes with the norm before it.
    routed = replace(case, index=routes)
    hidden = routed.normed(case.hidden) if "norm-missing" in wrong else case.hidden
    logits = routed.logits(hidden)
    if "logits-scaled" in wrong:
        logits = logits * 0.6
    if "logits-softcapped" in wrong:
        logits = 4 * (logits / 4).tanh()
    if "log-probs-not-logits" in wrong:
        logits = logits.log_softmax(-1)
    if "vocab-window-shifted" in wrong:
        k = case.V // case.tp if case.tp > 1 else 5
        logits = logits.roll(-k, -1)
        logits[..., -k:] = torch.finfo(torch.bfloat16).min if case.S % 2 else 0.0
    if "vocab-padded" in wrong:
        logits[..., -7:] = -torch.inf
    if "sequence-shifted" in wrong:
        logits = logits.roll(-1, 1)
    if "cp-contiguous" in wrong or "cp-rank-swapped" in wrong:
        if case.cp == 1:
            return None
        local = case.padded // case.cp
        order = zigzag(case)
        if "cp-contiguous" in wrong:
            return shards(case, logits, lambda r: list(range(r * local, (r + 1) * local)))
        return shards(case, logits, lambda r: order((r + 1) % case.cp))
    return logits


AXES = (
    ("vocab-window-shifted", "vocab-padded"),
    ("single-head-for-all", "teachers-misrouted"),
    ("norm-missing",),
    ("sequence-shifted",),
    ("logits-scaled", "logits-softcapped", "log-probs-not-logits"),
    ("cp-contiguous", "cp-rank-swapped"),
)
PAIRS = [
    pair for a, b in combinations(AXES, 2) for pair in ((one, other) for one in a for other in b)
] + [("logits-scaled", "log-probs-not-logits")]
"""Every two of different kinds, and log-probabilities at a temperature."""


def inject(where: Path, pair: tuple[str, str], seed: int) -> tuple[str, ...] | None:
    """What is named for a pair, or None where the case cannot have it."""
    case = make_case(where, seed)
    reference = at_once(case, pair)
    if reference is None:
        return None
    report = run(write(case, reference))
    assert not report.passed
    exact = [d for d in report.diagnosis if d.match == "exact"]
    wanted = tuple(sorted(pair, key=list(faults()).index))
    for found in exact:
        if found.faults == wanted:
            assert found.fault == wanted[0]
            return wanted
    return tuple(name for d in exact for name in d.faults or (d.fault,))


def test_the_pairs_are_of_two_known_faults() -> None:
    assert len(PAIRS) > 40
    assert {name for pair in PAIRS for name in pair} <= set(faults())


@pytest.mark.parametrize(
    "pair",
    [
        ("teachers-misrouted", "logits-scaled"),
        ("norm-missing", "logits-softcapped"),
        ("vocab-window-shifted", "sequence-shifted"),
        ("single-head-for-all", "sequence-shifted"),
    ],
)
def test_two_likely_faults_at_once_are_named_together(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    found = [inject(tmp_path / "case", pair, seed) for seed in (5,)]
    assert any(found)
    wanted = tuple(sorted(pair, key=list(faults()).index))
    assert [named for named in found if named not in (None, wanted)] == []


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_is_named(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    missed = []
    for seed in range(8):
        found = inject(tmp_path / "case", pair, seed)
        if found is None:
            continue
        counts["injected"] += 1
        counts["named"] += set(found) == set(pair)
        if set(found) != set(pair):
            missed.append((seed, found))
    with capsys.disabled():
        print(
            f"\n{' + '.join(pair)}: injected {counts['injected']}, named {counts['named']}", end=""
        )
    assert counts["injected"] >= 3
    assert missed == []


Change = Callable[[Tensor], Tensor]
SCALE, CAP = 0.3, 2.0


def cap(logits: Tensor) -> Tensor:
    return CAP * (logits / CAP).tanh()


def half_precision(case: Case, logits: Tensor) -> Tensor:
    return logits.to(case.dtype).float()


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3, 4))])
@pytest.mark.parametrize(
    ("asked", "made", "wanted", "said"),
    [
        ({"softcap": CAP}, lambda x: x, [], "without --logit-softcap all of them agree"),
        (
            {"scale": SCALE, "softcap": CAP},
            lambda x: SCALE * x,
            [],
            "without --logit-softcap all of them agree",
        ),
        (
            {"scale": SCALE, "softcap": CAP},
            lambda x: x,
            [],
            "without --logit-scale and --logit-softcap all of them agree",
        ),
        ({"scale": SCALE}, lambda x: x, ["logits-scaled"], "3.33333 times"),
        ({"scale": SCALE, "softcap": CAP}, cap, ["logits-scaled"], "without the scale of 0.3"),
        ({"softcap": 7.0}, cap, ["logits-softcapped"], "a cap of 2"),
        ({"softcap": CAP}, lambda x: cap(x) / 0.7, ["logits-scaled"], "1.42857 times"),
        ({"softcap": CAP}, lambda x: cap(x).log_softmax(-1), ["log-probs-not-logits"], "log-sum"),
    ],
)
def test_what_was_asked_for_and_left_out_is_told(
    asked: dict[str, object], made: Change, wanted: list[str], said: str, seed: int, tmp_path: Path
) -> None:
    case = replace(make_case(tmp_path / "case", seed), options=asked)
    report = run(write(case, made(case.logits())))
    (found,) = [f for f in report.findings if f.code == "OPD503"]
    assert found.status == "fail"
    assert found.first
    assert [d.fault for d in report.diagnosis] == wanted
    assert said in found.message + "".join(d.message for d in report.diagnosis)
    assert ("all of them agree" in found.message) is (not wanted)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
@pytest.mark.parametrize(
    ("made", "wanted", "said"),
    [
        (lambda x: 0.7 * x, "logits-scaled", "0.7 times"),
        (cap, "logits-softcapped", "a cap of 2"),
        (lambda x: x.log_softmax(-1), "log-probs-not-logits", "log-sum-exp"),
    ],
)
def test_a_fault_of_logits_that_were_rounded_first_is_named_in_a_wider_file(
    made: Change, wanted: str, said: str, seed: int, tmp_path: Path
) -> None:
    case = replace(make_case(tmp_path / "case", seed), reference_dtype=torch.float32)
    assert case.dtype != torch.float32
    report = run(write(case, made(half_precision(case, case.logits()))))
    (found,) = report.diagnosis
    assert (found.fault, found.match) == (wanted, "exact")
    assert said in found.message
