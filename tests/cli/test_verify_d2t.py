"""``opdtool verify-d2t``: every form of input, every option, and what a report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli

IDS = [1, 2, 5, 7]
D2T = torch.tensor([1, 1, 3, 4])
T2D = torch.tensor([i in IDS for i in range(8)])
ABSOLUTE = torch.tensor(IDS)


def checkpoint(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A draft checkpoint of four ids of eight."""
    folder.mkdir()
    settings = {"vocab_size": 8, "draft_vocab_size": 4} | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    whole = {"d2t": D2T, "t2d": T2D, "lm_head.weight": torch.zeros(4, 3)} | tensors
    kept = {name: value for name, value in whole.items() if value is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def verify(cli: Cli, *argv: object) -> tuple[int, dict[str, Any]]:
    done = cli("verify-d2t", *argv, "--format", "json")
    assert done.status in (0, 1), done.err
    return done.status, json.loads(done.out)


def faults(report: dict[str, Any]) -> list[str]:
    return [each["fault"] for each in report["diagnosis"]]


def status_of(report: dict[str, Any], name: str) -> str:
    return str(next(c["status"] for c in report["checks"] if c["name"] == name))


def test_the_fixtures_draft_checkpoint_passes(cli: Cli, fixtures: Path) -> None:
    status, report = verify(cli, fixtures / "draft", "--tp", 4)
    assert status == 0
    assert report["diagnosis"] == []
    assert report["geometry"] == {"tp": 4, "vocab_size": 320, "draft_vocab_size": 32}
    assert status_of(report, "draft-head-rows") == "pass"
    assert report["summary"]["passed"] >= 12


def test_a_map_is_read_from_a_file_a_pair_an_npy_or_a_checkpoint(cli: Cli, tmp_path: Path) -> None:
    save_file({"d2t": D2T, "t2d": T2D}, tmp_path / "both.safetensors")
    save_file({"d2t": D2T}, tmp_path / "one.safetensors")
    save_file({"t2d": T2D}, tmp_path / "other.safetensors")
    np.save(tmp_path / "map.npy", D2T.numpy())
    np.save(tmp_path / "t2d.npy", T2D.numpy())
    np.save(tmp_path / "my_t2d.npy", T2D.numpy().astype(np.int64))
    checkpoint(tmp_path / "draft")
    for words, has_t2d in (
        (["both.safetensors"], True),
        (["one.safetensors"], False),
        (["one.safetensors", "other.safetensors"], True),
        (["other.safetensors", "one.safetensors"], True),
        (["map.npy"], False),
        (["map.npy", "t2d.npy"], True),
        (["t2d.npy", "map.npy"], True),
        (["map.npy", "other.safetensors"], True),
        (["draft"], True),
        (["draft/model.safetensors"], True),
    ):
        status, report = verify(cli, *[tmp_path / word for word in words], "--vocab-size", 8)
        assert (status, report["stats"]["has_t2d"]) == (0, has_t2d), words
        assert status_of(report, "d2t-range") == "pass"
    status, report = verify(cli, tmp_path / "map.npy", tmp_path / "my_t2d.npy")
    assert (status, faults(report)) == (1, ["t2d-not-boolean"])


def test_sizes_come_from_the_configuration_and_options_come_before_it(
    cli: Cli, tmp_path: Path
) -> None:
    draft = checkpoint(tmp_path / "draft", {"vocab_size": 6})
    status, report = verify(cli, draft)
    assert status == 1
    assert faults(report) == ["d2t-out-of-range", "t2d-mismatch"]
    assert verify(cli, draft, "--vocab-size", 8)[0] == 0
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"vocab_size": 8, "draft_vocab_size": 5}))
    status, report = verify(cli, draft, "--config", other)
    assert faults(report) == ["d2t-length", "draft-head-rows"]
    assert verify(cli, draft, "--config", other, "--draft-vocab-size", 4)[0] == 0


FAULTY: dict[str, tuple[dict[str, Any], list[object], str]] = {
    "absolute": ({"d2t": ABSOLUTE}, [], "d2t-absolute"),
    "zeros": ({"d2t": torch.zeros(4, dtype=torch.int64)}, [], "d2t-all-zero"),
    "arange": ({"d2t": torch.arange(4)}, [], "d2t-arange"),
    "range": ({"d2t": torch.tensor([1, 1, 3, 40]), "t2d": None}, [], "d2t-out-of-range"),
    "twice": ({"d2t": torch.tensor([1, 0, 3, 4]), "t2d": None}, [], "d2t-duplicate-targets"),
    "length": ({"d2t": D2T[:3], "t2d": None}, [], "d2t-length"),
    "t2d": ({"t2d": T2D.flip(0)}, [], "t2d-mismatch"),
    "index map": ({"t2d": torch.arange(8)}, [], "t2d-not-boolean"),
    "order": ({"d2t": torch.tensor([2, 0, 3, 4])}, [], "d2t-order-with-t2d"),
    "tp": ({}, ["--tp", 3], "d2t-not-divisible"),
    "special": ({}, ["--must-include", "2,3"], "special-token-missing"),
    "head": ({"lm_head.weight": torch.zeros(5, 3)}, [], "draft-head-rows"),
    "stale": ({}, ["--against", "other.npy"], "stale-map"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_every_fault_fails_and_is_named_first_in_every_format(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tensors, argv, fault = FAULTY[name]
    monkeypatch.chdir(tmp_path)
    np.save("other.npy", np.array([1, 1, 3, 3]))
    assert verify(cli, checkpoint(tmp_path / "right"))[0] == 0
    draft = checkpoint(tmp_path / "draft", **tensors)
    status, report = verify(cli, draft, *argv)
    assert status == 1
    assert faults(report)[0] == fault
    assert report["diagnosis"][0]["match"] == "exact"
    for style in ("full", "concise", "github", "markdown"):
        done = cli("verify-d2t", draft, *argv, "--format", style)
        assert done.status == 1
        assert fault in done.out
    assert cli("verify-d2t", draft, *argv, "--exit-zero").status == 0


def test_ids_for_offsets_come_first_though_other_faults_hold_too(cli: Cli, tmp_path: Path) -> None:
    report = verify(cli, checkpoint(tmp_path / "draft", d2t=ABSOLUTE))[1]
    assert faults(report) == ["d2t-absolute", "d2t-out-of-range", "t2d-mismatch"]
    alone = checkpoint(tmp_path / "alone", d2t=ABSOLUTE, t2d=None)
    report = verify(cli, alone)[1]
    assert faults(report) == ["d2t-absolute", "d2t-out-of-range"]
    assert report["diagnosis"][0]["match"] == "likely"


def test_another_checkpoint_proves_ids_for_offsets(cli: Cli, tmp_path: Path) -> None:
    right = checkpoint(tmp_path / "right")
    wrong = checkpoint(tmp_path / "wrong", d2t=ABSOLUTE, t2d=None)
    report = verify(cli, wrong, "--against", right)[1]
    assert faults(report) == ["d2t-absolute", "d2t-out-of-range", "stale-map"]
    assert report["diagnosis"][0]["match"] == "exact"


def test_equal_sizes_without_a_map_are_an_identity_and_are_said(cli: Cli, tmp_path: Path) -> None:
    sizes = {"vocab_size": 4, "draft_vocab_size": 4}
    for name, d2t in (("none", None), ("zeros", torch.zeros(4, dtype=torch.int64))):
        draft = checkpoint(tmp_path / name, sizes, d2t=d2t, t2d=None)
        status, report = verify(cli, draft)
        assert status == 0
        assert report["stats"]["identity"] is True
        assert status_of(report, "identity-map") == "pass"
        assert "identity" in cli("verify-d2t", draft).out


def test_three_sizes_are_shown_side_by_side(cli: Cli, fixtures: Path) -> None:
    argv = ["--tokenizer-vocab-size", 300, "--tp", 6, "--pad-vocab-to-multiple-of", 128]
    out = cli("verify-d2t", fixtures / "draft", *argv).out
    rows = {
        tuple(line.split()) for line in out.splitlines() if line.strip().startswith(("t", "draft"))
    }
    assert ("tokenizer", "300", "50", "0") in rows
    assert ("target", "320", "53", "2") in rows
    assert ("target,", "padded", "to", "a", "multiple", "of", "128", "384", "64", "0") in rows


def test_a_target_vocabulary_that_does_not_divide_is_refused_unless_its_padding_is_said(
    cli: Cli, tmp_path: Path
) -> None:
    np.save(tmp_path / "m.npy", np.array([1, 1, 2, 2, 3, 3]))
    whole = [tmp_path / "m.npy", "--vocab-size", 101]
    assert verify(cli, *whole)[0] == 0
    for argv, said in (
        (["--tp", 2], "101 ids does not divide by --tp 2: 1 left over"),
        (["--tp", 6], "--pad-vocab-to-multiple-of 6"),
        (["--tp", 6, "--pad-vocab-to-multiple-of", 8], "101 ids, padded to 104, does not divide"),
    ):
        done = cli("verify-d2t", *whole, *argv)
        assert (done.status, done.out) == (2, "")
        assert said in done.err
        assert len(done.err.splitlines()) <= 2
    for tp, multiple in ((2, 2), (6, 6), (6, 64), (3, 3)):
        argv = ["--tp", tp, "--pad-vocab-to-multiple-of", multiple]
        if (-(-101 // multiple) * multiple) % tp:
            assert cli("verify-d2t", *whole, *argv).status == 2
            continue
        status, report = verify(cli, *whole, *argv)
        assert (status, status_of(report, "vocab-divisible")) == (0, "pass")
    assert verify(cli, tmp_path / "m.npy", "--tp", 2)[0] == 0  # no size is known


def test_a_map_that_does_not_divide_is_named_though_the_target_does_not_divide_either(
    cli: Cli, fixtures: Path
) -> None:
    assert 320 % 3
    assert 32 % 3
    status, report = verify(cli, fixtures / "draft", "--tp", 3)
    assert (status, faults(report)) == (1, ["d2t-not-divisible"])
    assert status_of(report, "vocab-divisible") == "warn"


def test_coverage_is_reported_beside_the_best_of_that_size(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "c.npy", np.array([10, 20, 30, 0, 0, 0, 0, 40]))
    status, report = verify(cli, checkpoint(tmp_path / "draft"), "--counts", tmp_path / "c.npy")
    assert status == 0
    assert report["stats"]["coverage"] == 0.9
    assert report["stats"]["best_coverage"] == 1.0
    batch = verify(cli, fixtures / "draft", "--batch", fixtures / "batch.safetensors")[1]
    ours = load_file(fixtures / "draft" / "model.safetensors")["t2d"]
    data = load_file(fixtures / "batch.safetensors")
    kept = (data["token_mask"] * data["sample_mask"][:, None]).bool()
    tokens = data["input_ids"][kept]
    assert len(tokens) > 100
    assert batch["stats"]["coverage"] == float(ours[tokens].float().mean().double()) or (
        batch["stats"]["coverage"] == int(ours[tokens].sum()) / len(tokens)
    )
    everything = ["--batch", fixtures / "batch.safetensors", "--count", "all"]
    assert verify(cli, fixtures / "draft", *everything)[1]["stats"]["counted_tokens"] > len(tokens)


def test_names_of_another_tool_are_renamed(cli: Cli, tmp_path: Path) -> None:
    save_file({"draft_to_target": D2T}, tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    assert verify(cli, path, "--rename", "d2t=draft_to_target")[0] == 0
    done = cli("verify-d2t", path)
    assert done.status == 2
    assert "draft_to_target" in done.err


def test_sequence_of_frequency_without_t2d_passes_and_is_reported(cli: Cli, tmp_path: Path) -> None:
    ids = torch.tensor([7, 1, 5, 2])
    np.save(tmp_path / "m.npy", (ids - torch.arange(4)).numpy())
    status, report = verify(cli, tmp_path / "m.npy", "--vocab-size", 8)
    assert (status, faults(report)) == (0, [])
    assert report["stats"]["ascending"] is False
    assert "order by frequency" in cli("verify-d2t", tmp_path / "m.npy", "--vocab-size", 8).out


def test_what_cannot_be_read_is_refused(cli: Cli, tmp_path: Path) -> None:
    save_file({"x": D2T}, tmp_path / "x.safetensors")
    save_file({"t2d": T2D}, tmp_path / "t2d.safetensors")
    save_file({"d2t": D2T}, tmp_path / "d2t.safetensors")
    save_file({"d2t": D2T.reshape(2, 2)}, tmp_path / "square.safetensors")
    (tmp_path / "d2t.pt").write_bytes(b"x")
    (tmp_path / "broken.json").write_text("{")
    d2t = tmp_path / "d2t.safetensors"
    for argv, said in (
        ([tmp_path / "x.safetensors"], "d2t"),
        ([tmp_path / "t2d.safetensors"], "it has a t2d and no d2t"),
        ([d2t, d2t], "both have a d2t"),
        ([d2t, d2t, d2t], "3 files given"),
        ([tmp_path / "square.safetensors"], "d2t has shape [2, 2]"),
        ([tmp_path / "none.safetensors"], "none.safetensors"),
        ([tmp_path / "d2t.pt"], "opdtool convert"),
        ([d2t, "--config", tmp_path / "broken.json"], "broken.json"),
        ([d2t, "--must-include", "a"], "'a' is no id"),
        ([d2t, "--count", "some"], "--count 'some'"),
        ([d2t, "--rename", "input_ids=x"], "no input has such a tensor"),
        ([d2t, "--against", tmp_path / "square.safetensors"], "d2t has shape [2, 2]"),
    ):
        done = cli("verify-d2t", *argv)
        assert done.status == 2, argv
        assert said in done.err
        assert len(done.err.splitlines()) <= 2
