"""A shift of the vocabulary or the sequence is found whatever lies where something fell off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opdtool.jobs.reconstruct.run import run
from tests.cli.teacher_cases import DTYPES, Case, Recorded, make_case, shards, write, zigzag

JUNK = (
    "finfo.min",
    "-inf",
    "inf",
    "nan",
    "zero",
    "one",
    "1e30",
    "wrapped",
    "random",
    "random, large",
)


def draw(made: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=made))


def shifted(logits: Tensor, axis: int, k: int, junk: str, made: torch.Generator) -> Tensor:
    """What lies at j is what was at j + k; what has nothing to come from is junk."""
    out = logits.roll(-k, axis)
    if junk == "wrapped":
        return out
    size = logits.shape[axis]
    edge = out.narrow(axis, size - k if k > 0 else 0, abs(k))
    noise = torch.randn(edge.shape, generator=made) * logits.std()
    fill = {
        "finfo.min": torch.full_like(edge, torch.finfo(torch.bfloat16).min),
        "-inf": torch.full_like(edge, -torch.inf),
        "inf": torch.full_like(edge, torch.inf),
        "nan": torch.full_like(edge, torch.nan),
        "zero": torch.zeros_like(edge),
        "one": torch.ones_like(edge),
        "1e30": torch.full_like(edge, 1e30),
        "random": noise,
        "random, large": 100 * noise,
    }
    edge.copy_(fill[junk])
    return out


def small_case(where: Path, seed: int) -> Case:
    """A case of any size: down to two positions, and a vocabulary of four windows."""
    made = torch.Generator().manual_seed(seed)
    case = make_case(where, seed)
    S, V = draw(made, 2, 20), 8 * draw(made, 4, 24)
    heads = {t: (torch.randn(V, case.H, generator=made) * 0.3).to(case.dtype) for t in case.heads}
    hidden = (torch.randn(case.B, S, case.H, generator=made) * 2).to(case.dtype)
    return replace(case, S=S, V=V, heads=heads, hidden=hidden, cp=1, tp=draw(made, 1, 4))


def vocabulary_case(where: Path, seed: int) -> tuple[Case, Recorded, int]:
    """A case, its shifted reference (one file or a shard a rank), and the shift."""
    made = torch.Generator().manual_seed(1000 + seed)
    case = small_case(where, seed)
    if case.tp == 3:
        case = replace(case, tp=2)  # of which a vocabulary of eights is a multiple
    window = case.V // case.tp
    k = (draw(made, 1, case.tp - 1) * window) if case.tp > 1 and seed % 3 else draw(made, 1, 12)
    k = k if draw(made, 0, 1) else -k
    logits = shifted(case.logits(), 2, k, JUNK[seed % len(JUNK)], made)
    if seed % 2:
        return case, shards(case, logits, zigzag(case)), k
    return case, logits, k


def sequence_case(where: Path, seed: int) -> tuple[Case, Recorded, int]:
    made = torch.Generator().manual_seed(2000 + seed)
    case = small_case(where, seed)
    case = replace(case, tp=1 if case.tp == 3 else case.tp, cp=draw(made, 1, 2))
    k = draw(made, 1, case.S // 2)
    k = k if draw(made, 0, 1) else -k
    logits = shifted(case.logits(), 1, k, JUNK[seed % len(JUNK)], made)
    if seed % 2:
        return case, shards(case, logits, zigzag(case)), k
    return case, logits, k


@pytest.mark.parametrize(
    ("fault", "make", "axis", "size_name"),
    [
        ("vocab-window-shifted", vocabulary_case, "j", "V"),
        ("sequence-shifted", sequence_case, "p", "S"),
    ],
)
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 306), marks=pytest.mark.slow)])
def test_a_shift_is_named_whatever_fell_off(
    fault: str,
    make: Callable[[Path, int], tuple[Case, Recorded, int]],
    axis: str,
    size_name: str,
    seeds: range,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts: Counter[str] = Counter()
    missed = []
    for seed in seeds:
        case, reference, k = make(tmp_path / "case", seed)
        numbers = {k}
        if JUNK[seed % len(JUNK)] == "wrapped":  # as far round the other way
            numbers.add(k - (size := getattr(case, size_name)) * (1 if k > 0 else -1))
            numbers = {n for n in numbers if 2 * abs(n) <= size}
        report = run(write(case, reference))
        counts["injected"] += 1
        counts["detected"] += not report.passed
        said = any(
            d.fault == fault
            and d.match == "exact"
            and not d.faults
            and f"{axis}{k:+d}" in d.message
            for d in report.diagnosis
            for k in numbers
        )
        counts["named"] += said
        if not said or report.passed:
            missed.append((seed, JUNK[seed % len(JUNK)], k, case.V, case.S, case.tp))
    with capsys.disabled():
        print(
            f"\n{fault}, any junk: injected {counts['injected']}, detected {counts['detected']}, "
            f"named {counts['named']}",
            end="",
        )
    assert counts["injected"] == len(seeds)
    assert {make_case(tmp_path, seed).dtype for seed in seeds} == set(DTYPES)
    assert missed == []
