"""Batches of a few tokens with any wrong tensor in their packs: failed, never a crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Cli

TOKENS = [(), (1,), (3,), (0,), (2, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64, torch.uint8]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(rng.integers(0, 2 if dtype == torch.bool else 9, shape)).to(dtype)


def tiny(rng: np.random.Generator) -> dict[str, Tensor]:
    """One to three rows of one to six tokens, and three tensors of any dimensions and dtype."""
    rows, width = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    tensors = {
        "input_ids": torch.from_numpy(rng.integers(1, 99, (rows, width))),
        "input_lengths": torch.from_numpy(rng.integers(1, width + 1, rows)),
        "token_mask": values(rng, (rows, width), torch.bool).to(
            DTYPES[int(rng.integers(len(DTYPES)))]
        ),
        "sample_mask": torch.ones(rows),
    }
    for i in range(3):
        token = TOKENS[int(rng.integers(len(TOKENS)))]
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        tensors[f"feature{i}"] = values(rng, (rows, width, *token), dtype)
    return tensors


def other(rng: np.random.Generator, value: Tensor) -> Tensor:
    """A tensor made wrong in one of many ways, its dimensions kept."""
    flat = value.clone().reshape(-1)
    if flat.numel() == 0:
        return value
    at = int(rng.integers(flat.numel()))
    way = int(rng.integers(7))
    if way == 0:
        flat[at] = not flat[at] if value.dtype == torch.bool else flat[at] + 1
    elif way == 1:
        flat[:] = 0
    elif way == 2:
        flat[:] = 1
    elif way == 3:
        flat = flat.flip(0)
    elif way == 4:
        flat = flat.roll(1)
    elif way == 5 and value.is_floating_point():
        flat[at] = float("nan")
    elif way == 6 and value.dtype == torch.int32:
        flat[at:] = flat[at:] - 3
    return flat.reshape(value.shape)


GEOMETRIES: list[list[object]] = [
    [],
    ["--pad-packed-multiple", 16],
    ["--pad-packed-multiple", 16, "--tail", "segment"],
    ["--pad-multiple", 3, "--fp8", "tensorwise"],
    ["--cp", 2],
    ["--cp", 2, "--pad-packed-multiple", 16],
    ["--cp", 2, "--max-tokens", 12],
]


def wrong_packs(
    rng: np.random.Generator, cli: Cli, folder: Path, rounds: int
) -> Iterator[tuple[list[Path], Path, list[object], int]]:
    """Packs of a tiny batch with one or two tensors wrong: files, batch, geometry, changes."""
    batch, packs = folder / "b.safetensors", folder / "packs"
    tensors = tiny(rng)
    save_file(tensors, batch)
    geometry = GEOMETRIES[int(rng.integers(len(GEOMETRIES)))]
    done = cli("pack", batch, "-o", packs, "--force", *geometry)
    assert done.status in (0, 2), done.err  # a row may be longer than --max-tokens
    if done.status:
        return
    files = sorted(packs.glob("*.safetensors"))
    geometry = [word for word in geometry if word not in ("--max-tokens", 12)]
    for _ in range(rounds):
        changed = 0
        paths = []
        held = [load_file(file) for file in files]
        for _ in range(int(rng.integers(1, 3))):
            name = list(held[0])[int(rng.integers(len(held[0])))]
            for pack in held if rng.random() < 0.5 else held[:1]:
                was = pack[name].clone()
                pack[name] = other(rng, was)
                changed += not torch.equal(was, pack[name])
        for file, pack in zip(files, held, strict=True):
            paths.append(folder / file.name)
            save_file({name: value.contiguous() for name, value in pack.items()}, paths[-1])
        yield paths, batch, geometry, changed


def judge(cli: Cli, folder: Path, seeds: range) -> int:
    """How many wrong packs were judged; none of them by an internal error."""
    judged = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        home = folder / str(seed)
        home.mkdir()
        for paths, batch, geometry, changed in wrong_packs(rng, cli, home, rounds=3):
            words = [*paths, "--batch", batch, *geometry, "--format", "concise"]
            for command in ("verify-pack", "verify-mask"):
                if command == "verify-mask" and "draft_token_mask" not in load_file(paths[0]):
                    continue
                outcome = cli(command, *words)
                assert outcome.status in (0, 1, 2), (seed, command, geometry, outcome.err)
            judged += changed > 0
    return judged


def test_any_wrong_tensor_of_a_tiny_pack_is_judged_and_never_an_internal_error(
    cli: Cli, tmp_path: Path
) -> None:
    assert judge(cli, tmp_path, range(12)) > 15


@pytest.mark.slow
def test_many_wrong_tensors_of_tiny_packs_are_judged(cli: Cli, tmp_path: Path) -> None:
    assert judge(cli, tmp_path, range(1000, 1200)) > 320


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("token", [(), (1,), (3,), (2, 2)], ids=str)
def test_a_wrong_feature_of_rows_shorter_than_their_segments_is_located(
    cli: Cli, tmp_path: Path, token: tuple[int, ...], dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(1)
    hidden = values(rng, (2, 8, *token), torch.bool).to(dtype)
    batch, packs = tmp_path / "b.safetensors", tmp_path / "packs"
    lengths = torch.tensor([3, 2])
    save_file(
        {"input_ids": torch.ones(2, 8).long(), "input_lengths": lengths, "hidden": hidden}, batch
    )
    assert cli("pack", batch, "-o", packs, "--pad-packed-to", 16).status == 0
    tensors = load_file(packs / "pack-00000.safetensors")
    first = tensors["hidden"][0, 0].reshape(-1)
    first[0] = not first[0]
    loose = tmp_path / "x.safetensors"
    save_file(tensors, loose)
    outcome = cli(
        "verify-pack", loose, "--batch", batch, "--pad-packed-to", 16, "--format", "concise"
    )
    assert outcome.status == 1
    assert "fail OPD204" in outcome.out
    assert "1 of 16 slots differ from the batch; first: sequence 0, position 0" in outcome.out
    assert "diagnosis" not in outcome.out
