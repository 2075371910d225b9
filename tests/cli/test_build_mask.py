"""``opdtool build-mask``: its files, value by value, and what it refuses."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli
from tests.reference import faults as slow


@pytest.mark.parametrize("seed", range(6))
def test_the_mask_is_that_of_the_slow_reference_and_verifies(
    cli: Cli, tmp_path: Path, seed: int
) -> None:
    world = slow.random_world(np.random.default_rng(seed))
    batch = tmp_path / "b.safetensors"
    save_file(
        {
            "token_mask": torch.from_numpy(world.token_mask).bfloat16(),
            "sample_mask": torch.from_numpy(world.sample_mask).bool(),
            "input_lengths": torch.tensor(world.lengths),
        },
        batch,
    )
    tail = "segment" if world.tail_segment else "absorb"
    geometry = ("--cp", world.cp, "--pad-multiple", world.multiple, "--tail", tail,
                "--pad-packed-to", world.total)  # fmt: skip
    done = cli("build-mask", batch, "-o", tmp_path / "m.safetensors", *geometry)
    assert done.status == 0, done.err
    names = (
        ["m.safetensors"]
        if world.cp == 1
        else [f"m.cp{rank}of{world.cp}.safetensors" for rank in range(world.cp)]
    )
    right = slow.right(world)
    assert sum(int(shard.sum()) for shard in right.shards) > 0
    for rank, name in enumerate(names):
        made = load_file(tmp_path / name)
        assert made["draft_token_mask"].dtype == torch.bfloat16
        assert made["draft_token_mask"].shape == (1, world.total // world.cp)
        assert made["draft_token_mask"][0].tolist() == right.shards[rank].tolist()
        assert made["cu_seqlens"].tolist() == world.cu
        assert made["cu_seqlens_padded"].tolist() == world.starts
        assert made["cu_seqlens"].dtype == torch.int32
        assert made["sequence_index"].tolist() == list(range(world.rows))
        mode = stat.S_IMODE(os.stat(tmp_path / name).st_mode)
        umask = os.umask(0)
        os.umask(umask)
        assert mode == 0o666 & ~umask
    files = [tmp_path / name for name in names]
    assert cli("verify-mask", *files, "--batch", batch, *geometry).status == 0


def test_an_existing_mask_is_kept_unless_forced(cli: Cli, tmp_path: Path) -> None:
    batch = tmp_path / "b.safetensors"
    save_file({"token_mask": torch.ones(2, 4)}, batch)
    out = tmp_path / "m.safetensors"
    out.write_bytes(b"mine")
    refused = cli("build-mask", batch, "-o", out)
    assert refused.status == 2
    assert "--force" in refused.err
    assert out.read_bytes() == b"mine"
    assert cli("build-mask", batch, "-o", out, "--force").status == 0
    assert load_file(out)["draft_token_mask"].tolist() == [[1, 1, 1, 0, 1, 1, 1, 0]]


def test_what_cannot_be_built_is_refused(cli: Cli, tmp_path: Path) -> None:
    batch, out = tmp_path / "b.safetensors", tmp_path / "m.safetensors"
    save_file({"input_ids": torch.ones(2, 4, dtype=torch.int64)}, batch)
    missing = cli("build-mask", batch, "-o", out)
    assert missing.status == 2
    assert "token_mask" in missing.err
    save_file({"token_mask": torch.ones(2, 4), "input_lengths": torch.tensor([4, 0])}, batch)
    empty = cli("build-mask", batch, "-o", out)
    assert empty.status == 2
    assert "row 1" in empty.err
    assert cli("build-mask", batch, "-o", out, "--drop-empty").status == 0
    assert load_file(out)["sequence_index"].tolist() == [0]
    save_file({"token_mask": torch.tensor([[1.0, float("nan")]])}, batch)
    nan = cli("build-mask", batch, "-o", tmp_path / "n.safetensors")
    assert nan.status == 2
    assert not (tmp_path / "n.safetensors").exists()
    wrong = cli("build-mask", batch, "-o", tmp_path / "m.pt")
    assert wrong.status == 2
    assert "safetensors" in wrong.err
