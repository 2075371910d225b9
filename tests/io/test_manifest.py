"""Manifests: what is written, what is believed, and directories that differ from theirs."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opdtool import __version__
from opdtool.core.errors import InputError
from opdtool.io.background import workers
from opdtool.io.hashing import InputHasher, hash_inputs, sha256_file, sha256_tensor
from opdtool.io.manifest import ManifestInput, has_manifest, make_manifest, read_manifest
from opdtool.io.outdir import OutputDir
from opdtool.io.tensors import open_tensors
from opdtool.io.verify import verify_files
from opdtool.io.writer import save_tensors

Document = dict[str, Any]


def made(tmp_path: Path) -> Path:
    """A directory of two files with its manifest."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "batch.safetensors").write_bytes(b"input")
    with OutputDir(tmp_path / "out") as out:
        out.save_tensors("b.safetensors", {"x": torch.ones(2, 3)})
        out.save_tensors("a.safetensors", {"y": torch.arange(4)})
        manifest = make_manifest(
            "pack",
            geometry={"cp": 2, "tail": "absorb", "sequence_parallel": False},
            files=out.files,
            inputs=[
                *hash_inputs([tmp_path / "in" / "batch.safetensors"]),
                ManifestInput("h", "0" * 64, "head", 3, "lm_head.weight"),
            ],
            batch=(8, 128),
            algorithm="bfd",
            extra={"bins": [1, 2]},
        )
        out.finish(manifest.to_json())
    return tmp_path / "out"


def test_a_manifest_says_what_the_directory_holds(tmp_path: Path) -> None:
    path = made(tmp_path)
    document = json.loads((path / "manifest.json").read_text())
    raw = (path / "b.safetensors").read_bytes()
    assert document["schema"] == "opdtool.manifest/1"
    assert document["tool"] == {"name": "opdtool", "version": __version__}
    assert document["kind"] == "pack"
    assert document["batch"] == {"rows": 8, "width": 128}
    assert document["algorithm"] == "bfd"
    assert document["geometry"] == {"cp": 2, "sequence_parallel": False, "tail": "absorb"}
    assert list(document["files"]) == ["a.safetensors", "b.safetensors"]
    assert document["files"]["b.safetensors"] == {
        "size": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "tensors": {"x": {"dtype": "F32", "shape": [2, 3]}},
    }
    assert document["inputs"] == [
        {
            "name": "batch.safetensors",
            "role": "batch",
            "sha256": hashlib.sha256(b"input").hexdigest(),
        },
        {
            "name": "h",
            "role": "head",
            "sha256": "0" * 64,
            "index": 3,
            "tensor": "lm_head.weight",
        },
    ]


def test_a_manifest_holds_no_path_and_its_keys_are_sorted(tmp_path: Path) -> None:
    text = (made(tmp_path) / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = made(tmp_path)
    manifest = read_manifest(path)
    assert manifest.to_json() == (path / "manifest.json").read_text()
    assert manifest.batch == (8, 128)
    assert manifest.file("a.safetensors").tensors == {"y": ("I64", (4,))}
    assert manifest.extra == {"bins": [1, 2]}
    assert has_manifest(path)
    assert not has_manifest(tmp_path)
    with pytest.raises(InputError, match=r"manifest\.json: no such file"):
        read_manifest(tmp_path)


def _set(*keys: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


FILE = {"size": 1, "sha256": "0" * 64, "tensors": {}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("schema", value="opdtool.manifest/2"), "opdtool.manifest/1 is expected"),
        (_set("schema", value=None), "opdtool.manifest/1 is expected"),
        (_set("kind", value="other"), "one of pack, reconstruct"),
        (_set("kind", value=["pack"]), "kind is"),
        (_set("geometry", value=[]), "geometry is not a JSON object"),
        (_set("geometry", "cp", value=[1]), "geometry.'cp' is not a plain value"),
        (_set("batch", value=3), "batch is not a JSON object"),
        (_set("batch", "rows", value=-1), "rows is -1"),
        (_set("batch", "rows", value=True), "rows is True"),
        (_set("batch", "width", value=2**63), "width is 9223372036854775808"),
        (_set("algorithm", value=7), "algorithm is 7"),
        (_set("files", value=None), "files is not a JSON object"),
        (_set("files", "a.safetensors", value=3), "files['a.safetensors'] is not a JSON object"),
        (_set("files", "../x", value=FILE), "'../x' is not the name of a file beside it"),
        (_set("files", "/etc/passwd", value=FILE), "is not the name of a file beside it"),
        (_set("files", "..", value=FILE), "is not the name of a file beside it"),
        (_set("files", "", value=FILE), "is not the name of a file beside it"),
        (_set("files", "a\nb", value=FILE), "is not the name of a file beside it"),
        (_set("files", "a\\b", value=FILE), "is not the name of a file beside it"),
        (_set("files", "a.safetensors", "size", value=1.5), "size is 1.5"),
        (_set("files", "a.safetensors", "sha256", value="xyz"), "is not 64 hexadecimal digits"),
        (_set("files", "a.safetensors", "sha256", value=None), "sha256 is None"),
        (_set("files", "a.safetensors", "tensors", value=[]), "tensors is not a JSON object"),
        (_set("files", "a.safetensors", "tensors", "y", "dtype", value="I7"), "dtype 'I7'"),
        (_set("files", "a.safetensors", "tensors", "y", "shape", value="4"), "is not a list"),
        (_set("files", "a.safetensors", "tensors", "y", "shape", value=[True]), "is not a list"),
        (_set("files", "a.safetensors", "tensors", "y", value=None), "is not a JSON object"),
        (_set("inputs", value={}), "inputs is not a list"),
        (_set("inputs", value=[3]), "an input is not a JSON object"),
        (_set("inputs", value=[{"name": "x"}]), "sha256 is None"),
        (_set("extra", value=3), "extra is not a JSON object"),
        (_set("tool", value=None), "tool is not a JSON object"),
    ],
)
def test_a_manifest_that_was_tampered_with_is_refused(
    change: Callable[[Document], None], reason: str, tmp_path: Path
) -> None:
    path = made(tmp_path)
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    (path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(InputError) as refusal:
        read_manifest(path)
    assert reason in str(refusal.value)
    assert str(path / "manifest.json") in str(refusal.value)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"a": 1, "a": 1}', b"\xff", b"[" * 99_999, b'{"a": NaN}']
)
def test_a_manifest_that_is_none_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(InputError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_a_directory_that_is_whole_has_no_problems(tmp_path: Path) -> None:
    path = made(tmp_path)
    assert len(read_manifest(path).files) == 2
    assert verify_files(path, read_manifest(path)) == []


def _flip(path: Path) -> None:
    raw = bytearray((path / "a.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "a.safetensors").write_bytes(raw)


def _link(path: Path) -> None:
    os.rename(path / "a.safetensors", path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / "a.safetensors")


def _other_tensors(path: Path) -> None:
    document = json.loads((path / "manifest.json").read_text())
    document["files"]["a.safetensors"]["tensors"]["y"]["shape"] = [2, 2]
    (path / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda path: (path / "a.safetensors").unlink(), "missing"),
        (_link, "missing"),
        (lambda path: os.truncate(path / "a.safetensors", 20), "size"),
        (_flip, "sha256"),
        (_other_tensors, "tensors"),
        (lambda path: save_tensors(path / "c.safetensors", {"x": torch.ones(1)}), "unlisted"),
    ],
)
def test_every_difference_from_the_manifest_is_found(
    damage: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    path = made(tmp_path)
    damage(path)
    problems = verify_files(path, read_manifest(path))
    name = "c.safetensors" if kind == "unlisted" else "a.safetensors"
    assert [(problem.kind, problem.file) for problem in problems] == [(kind, name)]
    assert name in problems[0].message


def test_hashes_are_those_of_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(b"")
    expected = hashlib.sha256(data).hexdigest()
    assert sha256_file(tmp_path / "a") == expected
    assert sha256_file(tmp_path / "b") == hashlib.sha256().hexdigest()
    hasher = InputHasher([tmp_path / "a"])
    hasher.add(tmp_path / "b", role="head")
    assert [(item.name, item.sha256[:8], item.role) for item in hasher.result()] == [
        ("a", expected[:8], "batch"),
        ("b", hashlib.sha256().hexdigest()[:8], "head"),
    ]
    with pytest.raises(InputError, match="no such file"):
        InputHasher([tmp_path / "c"]).result()


def test_the_hash_of_a_tensor_is_that_of_its_bytes(tmp_path: Path) -> None:
    tensor = torch.arange(3_000_000, dtype=torch.int16)
    save_tensors(tmp_path / "a.safetensors", {"x": tensor})
    with open_tensors(tmp_path / "a.safetensors") as source:
        assert sha256_tensor(source, "x") == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_what_is_hashed_is_what_was_there_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "b").write_bytes(b"new")
    gate = threading.Event()
    for _ in range(2):
        workers().submit(gate.wait, 60)  # both threads are busy until the files are moved
    hasher = InputHasher([tmp_path / "a"])
    os.replace(tmp_path / "b", tmp_path / "a")
    gate.set()
    assert hasher.result()[0].sha256 == hashlib.sha256(b"old").hexdigest()


@pytest.mark.parametrize(
    "name", ["two\nlines.safetensors", "caf\udce9.safetensors", "é.st", "\x1b"]
)
def test_inputs_of_any_name_that_a_system_allows_are_read_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"input")
    with OutputDir(tmp_path / "out") as out:
        out.save_tensors("b.safetensors", {"x": torch.ones(2, 3)})
        manifest = make_manifest(
            "reconstruct",
            geometry={},
            files=out.files,
            inputs=[*hash_inputs([path]), ManifestInput("h", "0" * 64, "head", -3, "w")],
        )
        out.finish(manifest.to_json())
    found = read_manifest(tmp_path / "out")
    assert [item.name for item in found.inputs] == [name, "h"]
    assert found.inputs[1].index == -3
    assert verify_files(tmp_path / "out", found) == []


@pytest.mark.parametrize("index", ["3", 1.5, True, 1 << 63, -(1 << 63) - 1, [1]])
def test_an_index_of_a_head_that_is_none_is_refused(index: object, tmp_path: Path) -> None:
    path = made(tmp_path)
    document = json.loads((path / "manifest.json").read_text())
    document["inputs"][1]["index"] = index
    (path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"index is .*; a number is expected"):
        read_manifest(path)
