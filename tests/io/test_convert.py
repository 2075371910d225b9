"""Torch files to safetensors: names, values, and that nothing in them is run."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from opdtool.cli.main import run
from opdtool.core.errors import InputError
from opdtool.io.convert import convert
from opdtool.io.tensors import open_tensors
from tests.io.test_npy import Trap


def converted(tmp_path: Path, value: Any, **options: Any) -> dict[str, torch.Tensor]:
    """What is in the safetensors file of a torch file of ``value``."""
    torch.save(value, tmp_path / "a.pt", **options)
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors", force=True)
    return load_file(tmp_path / "a.safetensors")


def test_nested_names_are_joined_with_dots(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    found = converted(
        tmp_path,
        {
            "model": OrderedDict(w=base, view=base[3:7], turned=base.reshape(3, 4).t()),
            "list": [torch.ones(1), (torch.zeros(2, dtype=torch.bfloat16),)],
            3: torch.tensor(5),
            "empty": torch.empty(0, 2),
            "parameter": torch.nn.Parameter(torch.ones(2)),
        },
    )
    assert sorted(found) == [
        "3", "empty", "list.0", "list.1.0", "model.turned", "model.view", "model.w", "parameter",
    ]  # fmt: skip
    assert torch.equal(found["model.view"], base[3:7])
    assert torch.equal(found["model.turned"], base.reshape(3, 4).t())
    assert found["list.1.0"].dtype == torch.bfloat16
    assert found["3"].item() == 5


def test_old_files_and_lone_tensors_are_converted(tmp_path: Path) -> None:
    old = converted(tmp_path, {"x": torch.arange(3)}, _use_new_zipfile_serialization=False)
    assert old["x"].tolist() == [0, 1, 2]
    assert converted(tmp_path, torch.arange(3))["a"].tolist() == [0, 1, 2]


def test_tensors_that_share_storage_are_each_whole(tmp_path: Path) -> None:
    shared = torch.arange(4)
    found = converted(tmp_path, {"a": shared, "b": shared})
    assert found["a"].tolist() == found["b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"model": torch.ones(1), "epoch": 3}, "epoch is a int, not a tensor"),
        ({"a": {"b": ["x"]}}, "a.b.0 is a str"),
        ({"a": None}, "a is a NoneType"),
        (3, "the whole file is a int"),
        ({}, "holds no tensors"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors would both be named a.b"),
        ({"": torch.ones(1)}, "cannot be the name"),
        ({"a\n": torch.ones(1)}, "cannot be the name"),
        ({"__metadata__": torch.ones(1)}, "cannot be the name"),
        ({"s": torch.ones(2).to_sparse()}, "s is torch.sparse_coo"),
        ({"c": torch.ones(2, dtype=torch.complex64)}, "c: torch.complex64"),
        ({"e": torch.ones(1).expand(1 << 40)}, "e is [1099511627776], far more than the file"),
    ],
)
def test_what_is_no_tensor_is_refused_by_its_key(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        converted(tmp_path, value)
    assert reason in str(refusal.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pt"]


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_file_is_run(zipped: bool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.pt: holds more than tensors"):
        converted(tmp_path, {"x": Trap(tmp_path / "sprung")}, _use_new_zipfile_serialization=zipped)
    assert not (tmp_path / "sprung").exists()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.ones(3))
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(3))
    return file.getvalue()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04", "its zip archive is cut off, broken or not torch's"),
        (b"PK\x03\x04" + b"x" * 100, "its zip archive is cut off, broken or not torch's"),
        (b"\x80\x02.", "its pickle is cut off, broken or not torch's"),
        (b"\x80\x02garbage", "its pickle is cut off, broken or not torch's"),
        (b"\x80\x05garbage", "its pickle is cut off, broken or not torch's"),
        (b"text", "it begins with b'text', which no torch file does"),
        (b"\x00" * 64, "it begins with b'\\x00\\x00\\x00"),
        (bytes(range(255, 0, -1)), "it begins with b'\\xff"),
        (npz(), "it is a NumPy archive; save its arrays as safetensors"),
        (npy(), "it is a NumPy array"),
        (save({"x": torch.ones(1)}), "it is safetensors already"),
    ],
)
def test_what_is_no_torch_file_is_refused_with_the_reason(
    raw: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "a.pt").write_bytes(raw)
    with pytest.raises(InputError) as refusal:
        convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    said = str(refusal.value)
    assert said.startswith(f"{tmp_path}/a.pt: not a torch file of tensors: {reason}")
    assert "holds more than tensors" not in said
    assert "weights_only" not in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pt"]


def test_a_truncated_or_a_plain_pickle_file_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(1000)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 3000)
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"x": [1, 2]}))
    for name in ("a.pt", "b.pt", "none.pt"):
        with pytest.raises(InputError, match=name):
            convert(tmp_path / name, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_an_existing_output_is_kept(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(3)}, tmp_path / "a.pt")
    (tmp_path / "out").write_text("precious")
    with pytest.raises(InputError, match="exists; pass --force"):
        convert(tmp_path / "a.pt", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"


def test_the_command_converts_beside_the_file_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": torch.arange(3), "y": torch.ones(2)}, tmp_path / "a.pt")
    assert run(["convert", str(tmp_path / "a.pt")]) == 0
    size = (tmp_path / "a.safetensors").stat().st_size
    assert capsys.readouterr().out == (
        f"wrote {tmp_path}/a.safetensors: 2 tensors, {size:,} bytes\n"
    )
    assert load_file(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2]
    assert run(["convert", str(tmp_path / "a.pt")]) == 2
    assert "exists; pass --force" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "a.pt"), "--force", "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_refuses_other_things_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": torch.arange(3), "epoch": 7}, tmp_path / "a.pt")
    assert run(["convert", str(tmp_path / "a.pt"), "-o", str(tmp_path / "b.safetensors")]) == 2
    captured = capsys.readouterr()
    assert f"{tmp_path}/a.pt: epoch is a int, not a tensor" in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "b.safetensors").exists()


def test_a_numpy_archive_is_not_sent_to_convert(tmp_path: Path) -> None:
    for name in ("z.npz", "z.safetensors"):
        (tmp_path / name).write_bytes(npz())
        with pytest.raises(InputError) as refusal:
            open_tensors([tmp_path / name])
        assert str(refusal.value).startswith(f"{tmp_path}/{name}: a numpy archive")
        assert "opdtool convert" not in str(refusal.value)
