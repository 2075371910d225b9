"""``opdtool compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from opdtool.cli import compare
from opdtool.io.tensors import TensorSource
from opdtool.report import schema
from tests.cli.conftest import Cli


def save(path: Path, **tensors: Tensor) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


def checks(out: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    whole = json.loads(out)
    jsonschema.Draft202012Validator(schema()).validate(whole)
    return {(check["name"], check["tensor"]): check for check in whole["checks"]}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    ids = torch.arange(12).reshape(3, 4)
    other = ids.clone()
    other[1, 2] += 5
    x = torch.tensor([1.0, 2.0, 100.0])
    a = save(tmp_path / "a.safetensors", ids=ids, x=x, same=x)
    b = save(tmp_path / "b.safetensors", ids=other, x=x + torch.tensor([0.0, 0.5, 1.0]), same=x)
    return a, b


def test_a_file_equals_itself(cli: Cli, pair: tuple[Path, Path]) -> None:
    done = cli("compare", pair[0], pair[0], "--format", "json")
    found = checks(done.out)
    assert done.status == 0
    assert found["same-values", "ids"]["total"] == 12
    assert {check["status"] for check in found.values()} == {"pass"}


def test_a_difference_is_found_at_its_place_with_both_values(
    cli: Cli, pair: tuple[Path, Path]
) -> None:
    done = cli("compare", *pair, "--format", "json")
    found = checks(done.out)
    assert done.status == 1
    ids, x = found["same-values", "ids"], found["same-values", "x"]
    assert ids["first"] == [{"index": "[1, 2]", "expected": 6, "actual": 11}]
    assert (ids["mismatches"], x["mismatches"], x["total"]) == (1, 2, 3)
    assert found["same-values", "same"]["status"] == "pass"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--atol", "0.5"], 1),
        (["--atol", "1"], 0),
        (["--rtol", "0.01"], 1),
        (["--rtol", "0.25"], 0),
        (["--rtol", "0.2", "--atol", "0.1"], 0),
        (["--rtol", "0.2", "--atol", "0.09"], 1),
    ],
)
def test_a_tolerance_passes_atol_plus_rtol_times_the_expected(
    cli: Cli, pair: tuple[Path, Path], options: list[str], wrong: int
) -> None:
    done = cli("compare", *pair, "--format", "json", *options)
    assert checks(done.out)["same-values", "x"]["mismatches"] == wrong


def test_nan_never_equals_and_infinities_equal_only_themselves(cli: Cli, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    a = save(tmp_path / "a.safetensors", x=torch.tensor([nan, inf, inf, 1.0, 0.0]))
    b = save(tmp_path / "b.safetensors", x=torch.tensor([nan, inf, -inf, inf, -0.0]))
    done = cli("compare", a, b, "--rtol", "10", "--atol", "10", "--format", "json")
    found = checks(done.out)["same-values", "x"]
    assert done.status == 1
    assert [place["index"] for place in found["first"]] == ["[0]", "[2]", "[3]"]
    assert found["first"][0] == {"index": "[0]", "expected": "nan", "actual": "nan"}


def test_a_tensor_that_one_side_lacks_fails(cli: Cli, tmp_path: Path) -> None:
    x = torch.ones(2)
    a = save(tmp_path / "a.safetensors", x=x, only_a=x)
    b = save(tmp_path / "b.safetensors", x=x, only_b=x)
    done = cli("compare", a, b, "--format", "json")
    found = checks(done.out)
    assert done.status == 1
    assert "in A but not in B" in found["same-tensors", "only_a"]["message"]
    assert "in B but not in A" in found["same-tensors", "only_b"]["message"]
    assert found["same-values", "x"]["status"] == "pass"


def test_another_shape_or_dtype_fails_and_is_not_compared(cli: Cli, tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", s=torch.zeros(2, 3), d=torch.zeros(2))
    b = save(tmp_path / "b.safetensors", s=torch.zeros(3, 2), d=torch.zeros(2).bfloat16())
    done = cli("compare", a, b, "--format", "json")
    found = checks(done.out)
    assert done.status == 1
    assert "[2, 3]" in found["same-shape", "s"]["message"]
    assert "BF16" in found["same-dtype", "d"]["message"]
    assert not [key for key in found if key[0] == "same-values"]


def test_large_integers_are_compared_exactly(cli: Cli, tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", x=torch.tensor([2**53, 2**62]))
    b = save(tmp_path / "b.safetensors", x=torch.tensor([2**53 + 1, 2**62]))
    done = cli("compare", a, b, "--format", "json")
    assert done.status == 1
    assert checks(done.out)["same-values", "x"]["first"] == [
        {"index": "[0]", "expected": 2**53, "actual": 2**53 + 1}
    ]


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn],
)
def test_every_dtype_is_compared(cli: Cli, tmp_path: Path, dtype: torch.dtype) -> None:
    a = save(tmp_path / "a.safetensors", x=torch.tensor([0, 1, 1]).to(dtype))
    b = save(tmp_path / "b.safetensors", x=torch.tensor([0, 1, 0]).to(dtype))
    assert cli("compare", a, a).status == 0
    done = cli("compare", a, b, "--format", "json")
    assert done.status == 1
    assert checks(done.out)["same-values", "x"]["first"][0]["index"] == "[2]"


def test_pieces_give_the_same_places_as_the_whole(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(60.0).reshape(3, 4, 5)
    y = x.clone()
    y.view(-1)[::4] += 1
    a, b = save(tmp_path / "a.safetensors", x=x), save(tmp_path / "b.safetensors", x=y)
    whole = cli("compare", a, b, "--format", "json").out
    monkeypatch.setattr(compare, "CHUNK", 28)
    assert cli("compare", a, b, "--format", "json").out == whole
    found = checks(whole)["same-values", "x"]
    assert found["mismatches"] == 15
    assert [place["index"] for place in found["first"][:3]] == [
        "[0, 0, 0]",
        "[0, 0, 4]",
        "[0, 1, 3]",
    ]


def test_directories_are_compared_file_by_file(cli: Cli, tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for n in range(2):
            save(tmp_path / side / f"{n}.safetensors", x=torch.full((2,), n))
    a, b = tmp_path / "a", tmp_path / "b"
    assert cli("compare", a, b).status == 0
    save(b / "1.safetensors", x=torch.full((2,), 7))
    save(a / "2.safetensors", x=torch.ones(1))
    done = cli("compare", a, b, "--format", "json")
    assert done.status == 1
    found = checks(done.out)
    assert found["same-values", "0.safetensors: x"]["status"] == "pass"
    assert found["same-values", "1.safetensors: x"]["mismatches"] == 2
    assert "2.safetensors" in found["same-tensors", None]["message"]


def test_sharded_checkpoints_equal_the_same_tensors_in_one_file(cli: Cli, tmp_path: Path) -> None:
    x, y = torch.arange(3), torch.arange(4.0)
    save(tmp_path / "whole.safetensors", x=x, y=y)
    shards = tmp_path / "shards"
    shards.mkdir()
    save(shards / "model-1.safetensors", x=x)
    save(shards / "model-2.safetensors", y=y)
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    done = cli("compare", tmp_path / "whole.safetensors", shards)
    assert done.status == 0, done.err


def test_nothing_to_compare_is_exit_2(cli: Cli, tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
    done = cli("compare", tmp_path / "a", tmp_path / "b")
    assert done.status == 2
    assert "nothing was checked" in done.err


def test_a_missing_file_and_a_bad_tolerance_are_exit_2(cli: Cli, pair: tuple[Path, Path]) -> None:
    assert "none.safetensors" in cli("compare", pair[0], "none.safetensors").err
    for bad in ("-1", "nan", "inf", "x"):
        done = cli("compare", *pair, "--rtol", bad)
        assert (done.status, done.out) == (2, "")
        assert "--rtol" in done.err


@pytest.mark.parametrize("command", ["compare", "inspect", "roll"])
def test_max_memory_bounds_what_is_held_at_once_and_changes_no_result(
    cli: Cli, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(4000.0).reshape(1, 1000, 4)
    cu = torch.tensor([0, 300, 1000], dtype=torch.int32)
    a = save(tmp_path / "a.safetensors", x=x, cu_seqlens_padded=cu)
    b = save(tmp_path / "b.safetensors", x=-x, cu_seqlens_padded=cu)
    reads: list[int] = []

    def spied(name: str) -> None:
        original = getattr(TensorSource, name)

        def read(self: TensorSource, *args: Any) -> Tensor:
            found: Tensor = original(self, *args)
            reads.append(found.numel() * found.element_size())
            return found

        monkeypatch.setattr(TensorSource, name, read)

    spied("read")
    spied("read_flat")
    out = tmp_path / "out.safetensors"
    argv: list[object] = {
        "compare": ["compare", a, b, "--format", "json"],
        "inspect": ["inspect", a, "--format", "json"],
        "roll": ["roll", a, "--name", "x", "-o", out, "--force"],
    }[command]
    whole = cli(*argv)
    made = out.read_bytes() if command == "roll" else b""
    assert max(reads) == 16000
    for size, most in (("4KiB", 1100), ("1", 32)):
        reads.clear()
        less = cli(*argv, "--max-memory", size)
        assert (less.status, less.out) == (whole.status, whole.out)
        assert command != "roll" or out.read_bytes() == made
        # Beside the offsets, which are always whole.
        assert len(reads) > 10
        assert max(reads) <= most
    assert cli(*argv, "--max-memory", "x").status == 2


@pytest.mark.parametrize("command", ["compare", "inspect", "roll"])
def test_a_device_that_is_not_there_is_exit_2(
    cli: Cli, pair: tuple[Path, Path], command: str
) -> None:
    argv = {
        "compare": ["compare", *pair],
        "inspect": ["inspect", pair[0]],
        "roll": ["roll", pair[0], "--name", "x", "-o", pair[0].parent / "o"],
    }[command]
    for device in ("cuda:99", "gpu"):
        done = cli(*argv, "--device", device)
        assert (done.status, done.out) == (2, "")
        assert f"--device {device}" in done.err.replace("'", "")
