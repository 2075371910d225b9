"""``opdtool inspect``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load_file, save_file

from opdtool.cli import inspect
from opdtool.report import schema
from tests.cli.conftest import Cli


def save(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def report(cli: Cli, *argv: object, status: int = 0) -> dict[str, Any]:
    done = cli("inspect", *argv, "--format", "json")
    assert done.status == status, done.err
    whole: dict[str, Any] = json.loads(done.out)
    jsonschema.Draft202012Validator(schema()).validate(whole)
    return whole


def of(whole: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [check for check in whole["checks"] if check["name"] == name]


def test_names_shapes_dtypes_bytes_and_values_are_shown(cli: Cli, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, 3.0], [inf, -inf, -7.0]]).bfloat16()
    file = save(tmp_path / "f.safetensors", x=x, n=torch.tensor([2, 9]), e=torch.zeros(0, 3))
    whole = report(cli, file)
    found = whole["stats"]["files"]["f.safetensors"]
    assert found["x"] == {
        "dtype": "BF16", "shape": [2, 3], "bytes": 12,
        "nan": 1, "inf": 2, "min": -7.0, "max": 3.0, "mean": -1.0,
    }  # fmt: skip
    assert (found["n"]["min"], found["n"]["max"], found["n"]["mean"]) == (2, 9, 5.5)
    assert (found["e"]["min"], found["e"]["mean"]) == (None, None)
    row = next(line for line in cli("inspect", file).out.splitlines() if line.startswith("  x "))
    assert row.split()[1:] == ["BF16", "[2,", "3]", "12", "1", "2", "-7", "3", "-1"]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
        torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.float8_e4m3fn, torch.float8_e5m2,
    ],
)  # fmt: skip
def test_every_dtype_has_figures_in_pieces_as_in_the_whole(
    cli: Cli, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(tmp_path / "f.safetensors", x=torch.tensor([0, 1, 1, 0, 1, 1, 1, 1]).to(dtype))
    monkeypatch.setattr(inspect, "CHUNK", 8)
    found = report(cli, file)["stats"]["files"]["f.safetensors"]["x"]
    assert (found["nan"], found["inf"]) == (0, 0)
    assert (found["min"], found["max"], found["mean"]) == (0, 1, 0.75)


def test_values_that_are_not_finite_warn(cli: Cli, tmp_path: Path) -> None:
    file = save(tmp_path / "f.safetensors", a=torch.tensor([float("nan"), 0.0]), b=torch.ones(1))
    whole = report(cli, file)
    assert [(c["status"], c["tensor"]) for c in of(whole, "finite-values")] == [("warn", "a")]


def test_the_fixtures_are_as_their_names_promise(cli: Cli, fixtures: Path) -> None:
    files = sorted(fixtures.glob("*.safetensors"))
    reports = {file.name: report(cli, file) for file in files}
    known = [name for name, whole in reports.items() if of(whole, "canonical-shape")]
    assert len(known) >= 4
    for whole in reports.values():
        assert whole["passed"]
        assert whole["summary"]["warned"] == 0


@pytest.mark.parametrize(
    ("tensors", "wrong"),
    [
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, "input_ids"),
        (
            {
                "input_ids": torch.zeros(2, 4, dtype=torch.int64),
                "token_mask": torch.zeros(4, 2),
            },
            "token_mask",
        ),
        (
            {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "sample_mask": torch.zeros(3)},
            "sample_mask",
        ),
        (
            {
                "cu_seqlens_padded": torch.tensor([0, 4]),
                "input_ids": torch.zeros(2, 4, dtype=torch.int64),
            },
            "input_ids",
        ),
        ({"d2t": torch.zeros(2, 2, dtype=torch.int64)}, "d2t"),
        ({"teacher_full_logits": torch.zeros(3, 4)}, "teacher_full_logits"),
    ],
)
def test_a_canonical_name_with_another_shape_fails(
    cli: Cli, tmp_path: Path, tensors: dict[str, torch.Tensor], wrong: str
) -> None:
    file = save(tmp_path / "f.safetensors", **tensors)
    whole = report(cli, file, status=1)
    failed = [c for c in of(whole, "canonical-shape") if c["status"] == "fail"]
    assert [c["tensor"] for c in failed] == [wrong]
    assert str(list(tensors[wrong].shape)) in failed[0]["message"]


@pytest.mark.parametrize(
    ("name", "tensor", "status"),
    [
        ("input_ids", torch.zeros(2, 4), "fail"),
        ("d2t", torch.zeros(3), "fail"),
        ("t2d", torch.zeros(3, dtype=torch.int64), "fail"),
        ("teacher_full_logits", torch.zeros(1, 2, 3, dtype=torch.int32), "fail"),
        ("token_mask", torch.zeros(2, 4, dtype=torch.int64), "warn"),
        ("token_mask", torch.zeros(2, 4, dtype=torch.bool), "pass"),
        ("cu_seqlens", torch.tensor([0, 4]), "warn"),
        ("cu_seqlens_padded", torch.tensor([0, 4]), "warn"),
        ("cu_seqlens_padded", torch.tensor([0, 4], dtype=torch.int32), "pass"),
        ("sequence_index", torch.tensor([0, 1], dtype=torch.int32), "warn"),
        ("sequence_index", torch.tensor([0, 1]), "pass"),
        ("d2t", torch.zeros(3, dtype=torch.int32), "warn"),
        ("d2t", torch.zeros(3, dtype=torch.int64), "pass"),
        ("input_lengths", torch.zeros(3, dtype=torch.int32), "pass"),
    ],
)
def test_a_canonical_name_with_another_dtype_is_reported(
    cli: Cli, tmp_path: Path, name: str, tensor: torch.Tensor, status: str
) -> None:
    file = save(tmp_path / "f.safetensors", **{name: tensor})
    whole = report(cli, file, status=int(status == "fail"))
    assert [c["status"] for c in of(whole, "canonical-dtype")] == [status]


@pytest.mark.parametrize(
    ("name", "shape", "status"),
    [
        ("position_ids", (2, 4), "warn"),
        ("position_ids", (1, 4), "pass"),
        ("position_ids", (4,), "fail"),
        ("target_ids", (2, 4), "warn"),
        ("draft_token_mask", (2, 4), "warn"),
        ("draft_token_mask", (4,), "warn"),
        ("draft_token_mask", (4, 1), "warn"),
        ("draft_token_mask", (1, 4), "pass"),
        ("draft_token_mask", (1, 4, 2), "fail"),
    ],
)
def test_what_is_packed_and_kept_in_another_known_shape_warns(
    cli: Cli, tmp_path: Path, name: str, shape: tuple[int, ...], status: str
) -> None:
    kind = torch.float32 if name.endswith("mask") else torch.int64
    file = save(tmp_path / "f.safetensors", **{name: torch.zeros(shape, dtype=kind)})
    found = of(report(cli, file, status=int(status == "fail")), "canonical-shape")
    assert [c["status"] for c in found] == [status]
    assert str(list(shape)) in found[0]["message"] or status == "pass"


def test_rows_beside_a_batch_are_of_the_batch_s_shape(cli: Cli, tmp_path: Path) -> None:
    ids = torch.zeros(3, 4, dtype=torch.int64)
    file = save(tmp_path / "f.safetensors", input_ids=ids, position_ids=ids[:2].clone())
    found = of(report(cli, file, status=1), "canonical-shape")
    assert [c["status"] for c in found if c["tensor"] == "position_ids"] == ["warn", "fail"]


def test_one_name_is_not_said_to_be_as_promised_and_not(cli: Cli, tmp_path: Path) -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    file = save(tmp_path / "f.safetensors", input_ids=ids, token_mask=ids.clone())
    found = of(report(cli, file), "canonical-dtype")
    assert [(c["status"], c["tensor"]) for c in found] == [("warn", "token_mask"), ("pass", None)]
    assert found[1]["message"] == "as the names promise: input_ids"


def test_a_rename_gives_a_tensor_its_canonical_name(cli: Cli, tmp_path: Path) -> None:
    file = save(tmp_path / "f.safetensors", tokens=torch.zeros(2, 4))
    assert of(report(cli, file), "canonical-dtype") == []
    whole = report(cli, file, "--rename", "input_ids=tokens", status=1)
    assert of(whole, "canonical-dtype")[0]["tensor"] == "input_ids"


def test_a_pack_is_as_its_manifest_says_until_a_byte_changes(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    packs = tmp_path / "packs"
    argv = ("pack", fixtures / "batch.safetensors", "-o", packs, "--cp", "2", "--max-tokens", "256")
    assert cli(*argv).status == 0
    files = sorted(packs.glob("*.safetensors"))
    assert len(files) > 2
    whole = report(cli, packs)
    assert [c["status"] for c in of(whole, "manifest-files")] == ["pass"]
    assert len(whole["stats"]["files"]) == len(files)
    raw = bytearray(files[0].read_bytes())
    raw[-1] ^= 1
    files[0].write_bytes(raw)
    files[1].unlink()
    save_file({"x": torch.ones(1)}, packs / "stray.safetensors")
    found = [c["message"] for c in of(report(cli, packs, status=1), "manifest-files")]
    assert len(found) == 3
    for file in (files[0], files[1], packs / "stray.safetensors"):
        assert any(file.name in message for message in found)


def test_checkpoints_sharded_or_not_are_shown_whole(cli: Cli, fixtures: Path) -> None:
    for teacher in ("teacher-a", "teacher-b"):
        whole = report(cli, fixtures / teacher)
        names = {name for found in whole["stats"]["files"].values() for name in found}
        stored = {n for f in (fixtures / teacher).glob("*.safetensors") for n in load_file(f)}
        assert len(stored) > 5
        assert names == stored


def test_a_file_without_tensors_is_exit_2_for_nothing_was_checked(cli: Cli, tmp_path: Path) -> None:
    file = save(tmp_path / "f.safetensors")
    for path in (file, tmp_path):
        done = cli("inspect", path)
        assert (done.status, done.out) == (2, "")
        assert done.err == f"error: {path}: holds no tensors; nothing was checked\n"
    save(tmp_path / "g.safetensors", x=torch.ones(1))
    assert cli("inspect", tmp_path).status == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "I32"), ("shape", [7]), ("shape", [1, 1, 128])],
)
def test_a_manifest_that_tells_other_tensors_than_its_files_hold_fails(
    cli: Cli, fixtures: Path, tmp_path: Path, key: str, value: object
) -> None:
    packs = tmp_path / "packs"
    cli("pack", fixtures / "batch.safetensors", "-o", packs, "--max-tokens", "256")
    manifest = json.loads((packs / "manifest.json").read_text())
    name, entry = next(iter(manifest["files"].items()))
    assert entry["tensors"]["input_ids"][key] != value
    entry["tensors"]["input_ids"][key] = value
    (packs / "manifest.json").write_text(json.dumps(manifest))
    found = of(report(cli, packs, status=1), "manifest-files")
    assert [c["status"] for c in found] == ["fail"]
    assert "input_ids" in found[0]["message"]
    assert name in found[0]["message"]


def test_an_empty_directory_and_a_missing_file_are_exit_2(cli: Cli, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.safetensors"):
        done = cli("inspect", path)
        assert (done.status, done.out) == (2, "")
        assert str(path) in done.err


@pytest.mark.parametrize(
    ("dtype", "count", "nbytes"),
    [("F4", 4, 2), ("F6_E2M3", 4, 3), ("F8_E8M0", 4, 4), ("C64", 2, 16)],
)
def test_a_dtype_that_torch_lacks_is_shown_without_its_values(
    cli: Cli, tmp_path: Path, dtype: str, count: int, nbytes: int
) -> None:
    entry = {"dtype": dtype, "shape": [count], "data_offsets": [4, 4 + nbytes]}
    plain = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"x": plain, "odd": entry}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 + nbytes))
    whole = report(cli, file)
    shown = whole["stats"]["files"]["odd.safetensors"]["odd"]
    assert shown["dtype"] == dtype
    assert (shown["shape"], shown["bytes"]) == ([count], nbytes)
    assert (shown["nan"], shown["inf"], shown["min"]) == (None, None, None)
    said = {check["status"]: check for check in of(whole, "finite-values")}
    assert said.keys() == {"pass", "skip"}
    assert (said["skip"]["tensor"], said["skip"]["message"]) == (
        "odd",
        f"values of dtype {dtype} are not read",
    )
    assert said["pass"]["message"] == "all values are finite in 1 tensor"
    text = cli("inspect", file)
    assert text.status == 0
    row = next(line.split() for line in text.out.splitlines() if line.split()[:1] == ["odd"])
    assert row[-5:] == ["-"] * 5


def test_a_head_that_cannot_be_read_is_refused_with_its_file(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    header = json.dumps(
        {"lm_head.weight": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}
    ).encode()
    file = tmp_path / "head.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    done = cli("reconstruct", fixtures / "teacher_hidden.safetensors", "--head", file)
    assert done.status == 2
    assert done.err.startswith(f"error: {file}: lm_head.weight has dtype F4, which cannot be read")
