"""Tails and padding as users meet them: what opdtool writes passes, and no fault is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Cli

MASK = "draft_token_mask"


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Rows of 4, 3 and 3 tokens."""
    path = tmp_path / "batch.safetensors"
    save_file(
        {
            "input_ids": torch.arange(1, 13).reshape(3, 4),
            "input_lengths": torch.tensor([4, 3, 3]),
            "token_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 0]]).float(),
        },
        path,
    )
    return path


def judged(cli: Cli, command: str, *words: object) -> tuple[int, dict[str, Any]]:
    outcome = cli(command, *words, "--format", "json")
    assert outcome.status in (0, 1), outcome.err
    report: dict[str, Any] = json.loads(outcome.out)
    return outcome.status, report


def failed(report: dict[str, Any]) -> set[str]:
    return {entry["code"] for entry in report["checks"] if entry["status"] == "fail"}


def built(cli: Cli, batch: Path, *geometry: object) -> tuple[Path, dict[str, Tensor]]:
    path = batch.with_name("mask.safetensors")
    assert cli("build-mask", batch, "-o", path, "--force", *geometry).status == 0
    return path, load_file(path)


@pytest.mark.parametrize("tail", ["absorb", "segment"])
@pytest.mark.parametrize(
    "geometry",
    [
        ("--pad-multiple", 3, "--fp8", "tensorwise"),
        ("--pad-multiple", 3, "--pad-packed-to", 40),
        ("--pad-multiple", 12, "--cp", 2, "--pad-packed-multiple", 8),
        ("--pad-multiple", 5, "--pad-packed-multiple", 7, "--max-tokens", 14),
    ],
    ids=str,
)
def test_what_is_padded_to_a_multiple_and_has_a_tail_passes(
    cli: Cli, batch: Path, tmp_path: Path, geometry: tuple[object, ...], tail: str
) -> None:
    packs = tmp_path / "packs"
    assert cli("pack", batch, "-o", packs, "--tail", tail, *geometry).status == 0
    for command in ("verify-pack", "verify-mask"):
        status, report = judged(cli, command, packs, "--batch", batch)
        assert status == 0, failed(report)
    if "--max-tokens" in geometry:
        return
    mask = tmp_path / "mask.safetensors"
    assert cli("build-mask", batch, "-o", mask, "--tail", tail, *geometry).status == 0
    masks = sorted(tmp_path.glob("mask*"))
    status, report = judged(cli, "verify-mask", *masks, "--batch", batch, "--tail", tail, *geometry)
    assert status == 0, failed(report)


@pytest.mark.parametrize("told", [True, False], ids=["told", "not-told"])
@pytest.mark.parametrize(
    "geometry",
    [
        ("--pad-multiple", 4),
        ("--pad-multiple", 4, "--pad-packed-to", 64, "--tail", "segment"),
        ("--pad-multiple", 8),
    ],
    ids=str,
)
def test_one_wrong_slot_in_padding_is_no_tail_that_was_not_clamped(
    cli: Cli, batch: Path, geometry: tuple[object, ...], told: bool
) -> None:
    path, tensors = built(cli, batch, *geometry)
    last = int(tensors["cu_seqlens_padded"][2])
    for slot in (last + 2, last + 3):
        mask = tensors[MASK].clone()
        assert mask[0, slot] == 0
        mask[0, slot] = 1
        save_file({**tensors, MASK: mask}, path)
        options = geometry if told else ()
        status, report = judged(cli, "verify-mask", path, "--batch", batch, *options)
        assert status == 1
        assert "OPD301" in failed(report)
        named = [entry["fault"] for entry in report["diagnosis"]]
        assert "tail-not-clamped" not in named


@pytest.mark.parametrize("geometry", [(), ("--pad-packed-to", 16)], ids=str)
def test_a_mask_that_runs_on_through_a_tail_is_named(
    cli: Cli, batch: Path, geometry: tuple[object, ...]
) -> None:
    path, tensors = built(cli, batch, "--pad-packed-to", 16)
    mask = tensors[MASK].clone()
    mask[0, 10:] = 1  # rows end at 4, 7 and 10
    save_file({**tensors, MASK: mask}, path)
    status, report = judged(cli, "verify-mask", path, "--batch", batch, *geometry)
    assert status == 1
    assert "tail-not-clamped" in [entry["fault"] for entry in report["diagnosis"]]


@pytest.mark.parametrize(
    "geometry",
    [
        ("--pad-packed-to", 16),
        ("--pad-packed-to", 16, "--tail", "segment"),
        ("--fp8", "tensorwise"),
        ("--pad-multiple", 4),
    ],
    ids=str,
)
def test_padding_that_was_not_told_is_asked_for_and_not_called_wrong(
    cli: Cli, batch: Path, geometry: tuple[object, ...]
) -> None:
    path, tensors = built(cli, batch, *geometry)
    save_file({MASK: tensors[MASK]}, path)
    assert judged(cli, "verify-mask", path, "--batch", batch, *geometry)[0] == 0
    status, report = judged(cli, "verify-mask", path, "--batch", batch)
    assert status == 1
    assert report["diagnosis"] == []
    end = next(entry for entry in report["checks"] if entry["code"] == "OPD107")
    assert geometry[0] in str(end["message"]).replace(",", "").replace(")", "").split()


def test_a_mask_padded_to_less_than_was_told_is_named_without_offsets(
    cli: Cli, batch: Path
) -> None:
    path, tensors = built(cli, batch, "--pad-multiple", 4)
    save_file({MASK: tensors[MASK]}, path)
    status, report = judged(
        cli, "verify-mask", path, "--batch", batch, "--pad-multiple", 8, "--pad-packed-to", 24
    )
    assert status == 1
    assert failed(report) >= {"OPD107"}
    assert [entry["fault"] for entry in report["diagnosis"]] == ["padding-multiple-wrong"]


@pytest.mark.parametrize("wrong", [3, 5])
def test_the_length_of_a_single_row_off_by_one_fails_and_is_named(
    cli: Cli, tmp_path: Path, wrong: int
) -> None:
    batch = tmp_path / "one.safetensors"
    save_file(
        {
            "input_ids": torch.arange(1, 7)[None],
            "input_lengths": torch.tensor([4]),
            "token_mask": torch.ones(1, 6),
        },
        batch,
    )
    path, tensors = built(cli, batch, "--pad-packed-to", 16)
    tensors["cu_seqlens"] = torch.tensor([0, wrong], dtype=torch.int32)
    save_file(tensors, path)
    for told in ((), ("--pad-packed-to", 16)):
        status, report = judged(cli, "verify-mask", path, "--batch", batch, *told)
        assert status == 1
        assert failed(report) == {"OPD108"}
        assert [entry["fault"] for entry in report["diagnosis"]] == ["lengths-off-by-one"]


def test_offsets_stored_as_floats_are_the_only_failure(cli: Cli, batch: Path) -> None:
    path, tensors = built(cli, batch, "--pad-packed-to", 16)
    floats = {n: t.float() if n.startswith("cu_") else t for n, t in tensors.items()}
    save_file(floats, path)
    status, report = judged(cli, "verify-mask", path, "--batch", batch)
    assert status == 1
    assert failed(report) == {"OPD101"}
    assert report["diagnosis"] == []
