"""What a pack must hold, what its manifest says of it, and tensors that are missing or short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Cli


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Rows of 8, 3 and 5 tokens; ``feat`` [3,8] has as many values a row as there are tokens."""
    path = tmp_path / "batch.safetensors"
    save_file(
        {
            "input_ids": torch.arange(1, 25).reshape(3, 8),
            "input_lengths": torch.tensor([8, 3, 5]),
            "token_mask": torch.ones(3, 8),
            "hidden": torch.arange(72.0).reshape(3, 8, 3),
            "feat": torch.arange(24.0).reshape(3, 8),
        },
        path,
    )
    return path


def packed(cli: Cli, batch: Path, *options: object) -> Path:
    out = batch.with_name("packs")
    assert cli("pack", batch, "-o", out, "--force", *options).status == 0
    return out


def judged(cli: Cli, *words: object) -> tuple[int, dict[str, Any]]:
    outcome = cli("verify-pack", *words, "--format", "json")
    assert outcome.status in (0, 1), outcome.err
    report: dict[str, Any] = json.loads(outcome.out)
    return outcome.status, report


def found(report: dict[str, Any], status: str) -> dict[tuple[str, str], str]:
    return {
        (entry["code"], entry["tensor"]): entry["message"]
        for entry in report["checks"]
        if entry["status"] == status
    }


def loose(packs: Path, change: Any, folder: Path) -> list[Path]:
    """The packs' files with something done to the tensors of each, out of the manifest's reach."""
    folder.mkdir(exist_ok=True)
    paths = []
    for source in sorted(packs.glob("*.safetensors")):
        tensors: dict[str, Tensor] = load_file(source)
        change(tensors)
        paths.append(folder / source.name)
        save_file({name: value.contiguous() for name, value in tensors.items()}, paths[-1])
    return paths


@pytest.mark.parametrize("options", [(), ("--cp", 2), ("--max-tokens", 10)], ids=str)
def test_the_manifest_says_which_tensors_go_by_rows(
    cli: Cli, batch: Path, options: tuple[object, ...]
) -> None:
    out = packed(cli, batch, "--row-aligned", "feat", *options)
    assert load_file(next(out.glob("*.safetensors")))["feat"].shape[1:] == (8,)
    for repeated in ((), ("--row-aligned", "feat")):
        status, report = judged(cli, out, "--batch", batch, *repeated)
        assert status == 0
        assert ("OPD205", "feat") in found(report, "pass")


def test_row_tensors_of_the_manifest_that_the_batch_lacks_are_told_of(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    out = packed(cli, batch, "--row-aligned", "feat")
    tensors = load_file(batch)
    del tensors["feat"]
    other = tmp_path / "other.safetensors"
    save_file(tensors, other)
    assert cli("verify-pack", out, "--batch", other).status == 0
    assert "feat" in cli("verify-pack", out, "--batch", other).out


@pytest.mark.parametrize("names", ["feat", [3], {"feat": 1}, [["feat"]]], ids=str)
def test_row_tensors_of_a_damaged_manifest_are_refused(cli: Cli, batch: Path, names: Any) -> None:
    out = packed(cli, batch, "--row-aligned", "feat")
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["extra"]["row_aligned"] = names
    (out / "manifest.json").write_text(json.dumps(manifest))
    outcome = cli("verify-pack", out, "--batch", batch)
    assert outcome.status == 2
    assert "manifest.json" in outcome.err
    assert "row_aligned" in outcome.err


@pytest.mark.parametrize("options", [(), ("--cp", 2)], ids=str)
def test_a_pack_without_input_ids_fails_and_others_that_are_missing_are_told(
    cli: Cli, batch: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    out = packed(cli, batch, *options)
    paths = loose(out, lambda tensors: tensors.pop("input_ids"), tmp_path / "loose")
    status, report = judged(cli, *paths, "--batch", batch)
    assert status == 1
    assert list(found(report, "fail")) == [("OPD201", "input_ids")]
    assert "no input_ids" in found(report, "fail")[("OPD201", "input_ids")]
    assert report["diagnosis"] == []
    for name, code in [
        ("target_ids", "OPD202"),
        ("position_ids", "OPD203"),
        ("draft_token_mask", "OPD301"),
    ]:
        paths = loose(out, lambda tensors, name=name: tensors.pop(name), tmp_path / "loose")
        status, report = judged(cli, *paths, "--batch", batch)
        assert status == 0
        assert list(found(report, "skip")) == [(code, name)]


def test_a_mask_alone_is_no_pack(cli: Cli, batch: Path, tmp_path: Path) -> None:
    mask = tmp_path / "mask.safetensors"
    assert cli("build-mask", batch, "-o", mask).status == 0
    status, report = judged(cli, mask, "--batch", batch)
    assert status == 1
    assert list(found(report, "fail")) == [("OPD201", "input_ids")]


@pytest.mark.parametrize("name", ["input_ids", "hidden"])
@pytest.mark.parametrize("every", [True, False], ids=["every-rank", "one-rank"])
def test_a_tensor_that_is_short_is_the_one_that_fails(
    cli: Cli, batch: Path, tmp_path: Path, name: str, every: bool
) -> None:
    out = packed(cli, batch, "--cp", 2)
    ranks = iter(range(2))

    def shorten(tensors: dict[str, Tensor]) -> None:
        if every or next(ranks) == 1:
            tensors[name] = tensors[name][:, :-1]

    paths = loose(out, shorten, tmp_path / "loose")
    status, report = judged(cli, *paths, "--batch", batch)
    assert status == 1
    assert list(found(report, "fail")) == [("OPD207", name)]
    assert report["diagnosis"] == []
