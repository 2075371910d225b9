"""What opdtool writes passes its own checks, whatever the geometry and whoever tells it."""

from __future__ import annotations

from math import lcm
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Cli


def geometry(rng: np.random.Generator) -> tuple[int, list[object]]:
    """CP, and options with any multiple of what it needs, any tail."""
    cp, tp = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2]))
    base = (2 * cp if cp > 1 else 1) * tp
    words: list[object] = ["--tail", str(rng.choice(["absorb", "segment"]))]
    words += ["--tp", tp, "--sequence-parallel"] if tp > 1 else []
    if rng.random() < 0.7:
        words += ["--pad-multiple", base * int(rng.integers(1, 8))]
    kind = rng.random()
    if kind < 0.3:
        words += ["--fp8", str(rng.choice(["tensorwise", "mxfp8"]))]
    elif kind < 0.6:
        words += ["--pad-packed-multiple", int(rng.integers(2, 12))]
    elif kind < 0.8:
        words += ["--pad-packed-to", base * lcm(5, 60)]
    return cp, words


def write_batch(rng: np.random.Generator, path: Path) -> None:
    rows, width = int(rng.integers(1, 5)), int(rng.integers(1, 10))
    save_file(
        {
            "input_ids": torch.from_numpy(rng.integers(1, 9, (rows, width))),
            "input_lengths": torch.from_numpy(rng.integers(1, width + 1, rows)),
            "token_mask": torch.from_numpy(rng.integers(0, 2, (rows, width))).float(),
            "sample_mask": torch.from_numpy(rng.integers(0, 2, rows)).float(),
            "hidden": torch.from_numpy(rng.integers(0, 9, (rows, width, 2))).bfloat16(),
        },
        path,
    )


def judge(cli: Cli, folder: Path, seeds: range) -> int:
    """How many packs were written; every one of them passes, and its mask too."""
    written = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        home = folder / str(seed)
        home.mkdir()
        batch, packs, mask = (
            home / name for name in ("b.safetensors", "packs", "mask.safetensors")
        )
        write_batch(rng, batch)
        cp, words = geometry(rng)
        done = cli("pack", batch, "-o", packs, "--cp", cp, *words)
        assert done.status in (0, 2), done.err
        if done.status == 2:
            assert "pad-packed-to" in done.err
            continue
        written += 1
        loose = sorted(packs.glob("*.safetensors"))
        assert cli("build-mask", batch, "-o", mask, "--cp", cp, *words).status == 0
        masks = sorted(home.glob("mask*"))
        for line in (
            ["verify-pack", packs],
            ["verify-pack", *loose, "--cp", cp, *words],
            ["verify-pack", *loose],
            ["verify-mask", packs],
            ["verify-mask", *masks, "--cp", cp, *words],
            ["verify-mask", *masks],
        ):
            outcome = cli(*line, "--batch", batch, "--format", "concise")
            assert outcome.status == 0, (seed, cp, words, line[0], outcome.out, outcome.err)
    return written


def test_what_is_written_passes_in_random_geometries(cli: Cli, tmp_path: Path) -> None:
    assert judge(cli, tmp_path, range(8)) >= 6


@pytest.mark.slow
def test_what_is_written_passes_in_many_random_geometries(cli: Cli, tmp_path: Path) -> None:
    assert judge(cli, tmp_path, range(100, 400)) > 200
