"""``opdtool roll``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli

CU = torch.tensor([0, 3, 3, 5], dtype=torch.int32)


def pack(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors | {"cu_seqlens_padded": CU}, path)
    return path


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_each_segment_is_shifted_left_and_ends_in_zero(
    cli: Cli, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    x = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int16).reshape(shape)
    out = tmp_path / "out.safetensors"
    done = cli("roll", pack(tmp_path / "p.safetensors", x=x), "--name", "x", "-o", out)
    assert (done.status, done.err) == (0, "")
    made = load_file(out)
    assert made["x"].tolist() == torch.tensor([2, 3, 0, 5, 0]).reshape(shape).tolist()
    assert made["x"].dtype == torch.int16
    assert made["cu_seqlens_padded"].equal(CU)


def test_what_stands_behind_the_slots_moves_with_them(cli: Cli, tmp_path: Path) -> None:
    x = torch.arange(10.0).reshape(1, 5, 2)
    out = tmp_path / "out.safetensors"
    assert cli("roll", pack(tmp_path / "p.safetensors", x=x), "--name", "x", "-o", out).status == 0
    assert load_file(out)["x"].tolist() == [[[2, 3], [4, 5], [0, 0], [8, 9], [0, 0]]]


def test_refusals_are_exit_2_and_write_nothing(cli: Cli, tmp_path: Path) -> None:
    file = pack(
        tmp_path / "p.safetensors", long=torch.ones(1, 6), rows=torch.ones(2, 5), x=torch.ones(5)
    )
    bare = tmp_path / "bare.safetensors"
    save_file({"x": torch.ones(5)}, bare)
    floats = tmp_path / "floats.safetensors"
    save_file({"x": torch.ones(5), "cu_seqlens_padded": torch.tensor([0.0, 5.0])}, floats)
    out = tmp_path / "out.safetensors"
    for path, name, said in (
        (file, "long", "cu_seqlens_padded ends at 5"),
        (file, "rows", "[1, T, ...]"),
        (file, "y", "no tensor y"),
        (bare, "x", "cu_seqlens_padded"),
        (floats, "x", "[N+1] integers"),
    ):
        done = cli("roll", path, "--name", name, "-o", out)
        assert (done.status, done.out) == (2, "")
        assert said in done.err
        assert path.name in done.err
        assert not out.exists()


def test_an_existing_output_is_kept_without_force(cli: Cli, tmp_path: Path) -> None:
    file, out = pack(tmp_path / "p.safetensors", x=torch.ones(5)), tmp_path / "out.safetensors"
    out.write_text("mine")
    assert cli("roll", file, "--name", "x", "-o", out).status == 2
    assert out.read_text() == "mine"
    assert cli("roll", file, "--name", "x", "-o", out, "--force").status == 0
    assert load_file(out)["x"].tolist() == [1, 1, 0, 1, 0]
