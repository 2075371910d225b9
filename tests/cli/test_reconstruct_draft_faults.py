"""With a draft map every known fault is still named, over the whole vocabulary and over the cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opdtool.jobs.reconstruct.run import run
from tests.cli.teacher_cases import FAULTS, Case, Recorded, differs, make_case, write

SQUARE = ("transposed",)
"""Faults that make heads of their own."""
PADDED = ("padded wider", "padding masked")
"""Padding of the whole vocabulary is cut away by the map."""


def with_map(case: Case, seed: int) -> tuple[Case, Tensor]:
    """The case with a map of half its vocabulary (a multiple of its ranks), in any order."""
    made = torch.Generator().manual_seed(seed)
    D = case.V // 2 // case.tp * case.tp
    ids = torch.randperm(case.V, generator=made)[:D]
    if seed % 2:
        ids = ids.sort()[0]
    return replace(case, d2t=ids - torch.arange(D)), ids


def recorded(name: str, case: Case, seed: int, kind: str) -> tuple[Case, Recorded, str] | None:
    """A reference with a fault: over the whole vocabulary, or over the draft columns, the fault
    made before the cut or after it."""
    make = FAULTS[name][1]
    if kind in ("whole", "before the cut"):
        made = make(case)
        if made is None or name in PADDED:
            return None
        case, reference, word = made
        if name == "norm twice by --norm" or differs(case, reference):
            case, ids = with_map(case, seed)
            if kind == "whole":
                return case, reference, word
            if isinstance(reference, Tensor):
                return case, reference[..., ids], word
        return None
    if name in SQUARE or name == "padded wider":  # which is refused: no such width
        return None
    mapped, ids = with_map(case, seed)
    cut = replace(case, V=len(ids), heads={t: w[ids] for t, w in case.heads.items()})
    made = make(cut)
    if made is None or (name != "norm twice by --norm" and not differs(made[0], made[1])):
        return None
    made[0].heads, made[0].V, made[0].d2t = case.heads, case.V, mapped.d2t
    return made


@pytest.mark.parametrize(
    "kind", ["whole", pytest.param("before the cut", marks=pytest.mark.slow), "after the cut"]
)
@pytest.mark.parametrize("seeds", [range(1, 2), pytest.param(range(2, 14), marks=pytest.mark.slow)])
def test_a_fault_is_named_through_a_draft_map(
    kind: str, seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    missed = []
    for name, (expected, _) in FAULTS.items():
        for seed in seeds:
            made = recorded(name, make_case(tmp_path / "case", seed), seed, kind)
            if made is None:
                continue
            case, reference, word = made
            report = run(write(case, reference))
            counts["injected"] += 1
            counts["detected"] += not report.passed
            found = {d.fault: d for d in report.diagnosis}
            # A shift of ids is said of ids, one of columns of columns.
            words = (word, word.replace("j", "t", 1)) if word.startswith("j") else (word,)
            named = (
                expected in found
                and found[expected].match == "exact"
                and any(w in found[expected].message for w in words)
                and not found[expected].faults
            )
            counts["named"] += named
            if not named or report.passed:
                said = [(d.fault, d.faults, d.message) for d in report.diagnosis]
                missed.append((name, seed, report.passed, case.B, case.S, case.V, said))
    with capsys.disabled():
        print(
            f"\nfaults through a draft map, {kind}: injected {counts['injected']}, detected "
            f"{counts['detected']}, named {counts['named']}",
            end="",
        )
    assert counts["injected"] >= 10 * len(seeds)
    assert missed == []
