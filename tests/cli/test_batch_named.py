"""What is wrong with a batch is said with the file and the tensor it is in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "batch.safetensors"
    save_file(
        {
            "input_ids": torch.arange(1, 17).reshape(4, 4),
            "input_lengths": torch.tensor([4, 3, 2, 4]),
            "token_mask": torch.ones(4, 4),
        },
        path,
    )
    return path


def changed(batch: Path, name: str, value: torch.Tensor, stem: str = "bad") -> Path:
    path = batch.with_name(f"{stem}.safetensors")
    save_file({**load_file(batch), name: value}, path)
    return path


@pytest.mark.parametrize("command", ["pack", "build-mask"])
@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([4, 0, 2, 0], "input_lengths: rows 1, 3 of length 0 cannot be packed"),
        ([0, 0, 0, 0], "input_lengths: rows 0, 1, 2, 3 of length 0 cannot be packed"),
    ],
)
def test_empty_rows_are_refused_with_their_file_and_tensor(
    cli: Cli, batch: Path, tmp_path: Path, command: str, lengths: list[int], said: str
) -> None:
    bad = changed(batch, "input_lengths", torch.tensor(lengths))
    outcome = cli(command, bad, "-o", tmp_path / "out.safetensors")
    assert outcome.status == 2
    assert f"{bad}: {said}" in outcome.err


def test_a_batch_of_nothing_but_empty_rows_is_refused_with_its_file(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    bad = changed(batch, "input_lengths", torch.zeros(4, dtype=torch.int64))
    outcome = cli("pack", bad, "-o", tmp_path / "out", "--drop-empty")
    assert outcome.status == 2
    assert f"{bad}: input_lengths: the batch has no rows with tokens" in outcome.err


def test_a_row_too_long_is_refused_with_its_file_and_what_told_its_length(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    outcome = cli("pack", batch, "-o", tmp_path / "out", "--max-tokens", 3)
    assert outcome.status == 2
    assert f"{batch}: input_lengths: row 0 has 4 tokens" in outcome.err
    tensors = load_file(batch)
    lengths = tensors.pop("input_lengths")
    tensors["attention_mask"] = (torch.arange(4) < lengths[:, None]).long()
    save_file(tensors, batch)
    outcome = cli("pack", batch, "-o", tmp_path / "out", "--max-tokens", 3)
    assert f"{batch}: attention_mask: row 0 has 4 tokens" in outcome.err


def test_of_several_files_the_first_is_named_and_the_others_counted(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    bad = changed(batch, "input_lengths", torch.tensor([4, 0, 2, 4]))
    outcome = cli("pack", batch, bad, "-o", tmp_path / "out")
    assert outcome.status == 2
    assert f"{batch} and 1 more: input_lengths: row 5 of length 0" in outcome.err


@pytest.mark.parametrize("cp", [1, 2])
def test_weights_that_are_not_finite_are_refused_with_their_file(
    cli: Cli, batch: Path, tmp_path: Path, cp: int
) -> None:
    packs = tmp_path / "packs"
    assert cli("pack", batch, "-o", packs, "--cp", cp).status == 0
    mask = torch.ones(4, 4)
    mask[2, 1] = float("nan")
    bad = changed(batch, "token_mask", mask)
    for command in ("verify-mask", "verify-pack"):
        outcome = cli(command, packs, "--batch", bad)
        assert outcome.status == 2
        assert f"{bad}: token_mask has a value that is not finite in row 2" in outcome.err


def test_the_file_of_several_that_holds_a_weight_is_named(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    packs = tmp_path / "packs"
    other = changed(batch, "token_mask", torch.ones(4, 4), "other")
    assert cli("pack", batch, other, "-o", packs, "--force").status == 0
    mask = torch.ones(4, 4)
    mask[2, 1] = float("nan")
    bad = changed(batch, "token_mask", mask)
    outcome = cli("verify-mask", packs, "--batch", batch, "--batch", bad)
    assert outcome.status == 2
    assert f"{bad}: token_mask has a value that is not finite in row 2;" in outcome.err
