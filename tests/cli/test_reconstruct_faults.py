"""Every known fault of teacher logits is found and named; nothing else ever is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from opdtool.io.checkpoints import HeadSpec
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.run import run
from tests.cli.teacher_cases import FAULTS, Case, differs, make_case, names, right, write


def inject(
    where: Path, fault: str, seeds: range
) -> tuple[Counter[str], list[tuple[int, list[str], str]]]:
    expected, make = FAULTS[fault]
    counts: Counter[str] = Counter()
    missed = []
    for seed in seeds:
        case = make_case(where, seed)
        made = make(case)
        if made is None:
            continue
        case, reference, word = made
        if fault != "norm twice by --norm" and not differs(case, reference):
            continue
        counts["injected"] += 1
        report = run(write(case, reference))
        counts["detected"] += not report.passed
        found = {d.fault: d for d in report.diagnosis}
        named = expected in found and word in found[expected].message
        counts["named"] += named
        counts["exact"] += named and found[expected].match == "exact"
        if not named or report.passed:
            said = found[expected].message if expected in found else ""
            missed.append((seed, names(report), said))
    return counts, missed


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 24), marks=pytest.mark.slow)])
def test_the_fault_is_found_and_named(
    fault: str, seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, missed = inject(tmp_path / "case", fault, seeds)
    with capsys.disabled():
        print(
            f"\n{fault}: injected {counts['injected']}, detected {counts['detected']}, "
            f"named {counts['named']}",
            end="",
        )
    assert counts["injected"] >= 1
    assert missed == []
    assert counts["detected"] == counts["named"] == counts["exact"] == counts["injected"]


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 120), marks=pytest.mark.slow)])
def test_a_right_reference_passes_and_nothing_is_diagnosed(
    seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alarms, checked = [], 0
    for seed in seeds:
        case = make_case(tmp_path / "case", seed)
        for reference in (case.logits(), right(case)):
            report = run(write(case, reference))
            checked += 1
            wanted = []
            if torch.finfo(case.reference_dtype).eps > torch.finfo(case.dtype).eps:
                wanted = ["rounding-only"]
            if not report.passed or names(report) != wanted:
                alarms.append((seed, names(report)))
    with capsys.disabled():
        print(f"\nright references: {checked} checked, {len(alarms)} false alarms", end="")
    assert checked == 2 * len(seeds)
    assert alarms == []


def corrupt(case: Case, kind: int, made: torch.Generator) -> Tensor:
    full = case.logits()
    b, s, v = (int(torch.randint(n, (1,), generator=made)) for n in full.shape)
    if kind == 0:  # one element
        full[b, s, v] += 3 + full[b, s, v].abs()
    elif kind == 1:  # one column
        full[..., v] += 2
    elif kind == 2:  # noise everywhere
        full += torch.randn(full.shape, generator=made)
    elif kind == 3:  # one position of another row
        full[b, s] = full[b, s].flip(-1)
    elif kind == 4:  # columns permuted at random
        full = full[..., torch.randperm(case.V, generator=made)]
    elif kind == 5:  # one weight row a tenth off
        full[..., v] *= 1.1
    else:  # half the positions scaled
        full[:, : case.S // 2 + 1] *= 1.3
    return full


@pytest.mark.parametrize("seeds", [range(7), pytest.param(range(7, 120), marks=pytest.mark.slow)])
def test_an_unknown_corruption_fails_and_gets_no_name(
    seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked, wrong = 0, []
    for seed in seeds:
        case = make_case(tmp_path / "case", seed)
        reference = corrupt(case, seed % 7, torch.Generator().manual_seed(seed))
        if not differs(case, reference):
            continue
        report = run(write(case, reference))
        checked += 1
        if report.passed or report.diagnosis:
            wrong.append((seed, report.passed, [d.message for d in report.diagnosis]))
    with capsys.disabled():
        print(f"\nunknown corruptions: {checked} checked, {len(wrong)} wrong", end="")
    assert checked > 0.7 * len(seeds)
    assert wrong == []


@pytest.mark.parametrize(
    "fault",
    [
        "misrouted",
        "sequence -2",
        "scaled",
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("window +k", "cp swapped")],
    ],
)
def test_a_fault_beside_a_stray_element_is_likely_and_says_how_much_it_explains(
    fault: str, tmp_path: Path
) -> None:
    expected, make = FAULTS[fault]
    seen = 0
    for seed in range(12):
        case = make_case(tmp_path / "case", seed)
        made = make(case)
        if made is None or case.B * case.S * case.V < 2000:
            continue
        case, reference, word = made
        if isinstance(reference, Tensor):
            reference[0, -1, 7] += 20
        else:
            reference[0][0][0, 0, 7] += 20
        report = run(write(case, reference))
        total = next(c.mismatches for c in report.findings if c.name == "logits-match")
        (found,) = [d for d in report.diagnosis if d.fault == expected]
        assert (found.match, word in found.message) == ("likely", True)
        assert total is not None
        assert found.score == pytest.approx(1 - 1 / total)
        seen += 1
        if seen == 3:
            break
    assert seen >= 2


@pytest.mark.parametrize("kind", ["windows", "pieces"])
def test_a_pack_that_was_cut_whole_is_named(kind: str, tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(3)
    offsets = [0, 8, 12, 24]
    hidden = torch.randn(1, 24, 16, generator=made)
    head = torch.randn(40, 16, generator=made)
    folder = tmp_path / "pack"
    folder.mkdir()
    save_file(
        {
            "teacher_full_hidden_states": hidden,
            "cu_seqlens_padded": torch.tensor(offsets, dtype=torch.int32),
        },
        folder / "payload.safetensors",
    )
    save_file({"lm_head.weight": head}, folder / "head.safetensors")
    full = hidden @ head.t()
    cuts = {
        "windows": [[*range(6), *range(18, 24)], list(range(6, 18))],
        "pieces": [list(range(12)), list(range(12, 24))],
    }
    segments = [[0, 1, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23], [2, 3, 4, 5, 9, 10, *range(15, 21)]]
    for cut, fault in ((segments, None), (cuts[kind], "cp-split-whole-pack")):
        paths = []
        for rank, slots in enumerate(cut):
            path = folder / f"r.cp{rank}of2.safetensors"
            save_file({"teacher_logits": full[:, slots].contiguous()}, path)
            paths.append(path)
        report = run(
            ReconstructJob(
                payload=folder / "payload.safetensors",
                heads=[HeadSpec(0, folder / "head.safetensors", None)],
                reference=paths,
                packed=True,
                device="cpu",
            )
        )
        assert names(report) == ([fault] if fault else [])
        assert report.passed is (fault is None)
