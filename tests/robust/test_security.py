"""Nothing an input says is believed: no code run, no path followed, no size allocated unseen."""

from __future__ import annotations

import ast
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opdtool.cli.main import run as run_here
from tests.robust.conftest import FIXTURES, ROOT, a_batch, contents, leftovers, save

BATCH = FIXTURES / "batch.safetensors"
BETWEEN_RANKS = {"opdtool/ranks/board.py", "opdtool/ranks/member.py", "opdtool/jobs/ranked.py"}
"""What ranks of one run tell each other, over a store of their own, is pickled; no file is."""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit status, stderr) of a command line; never an internal error."""

    def call(*argv: object) -> tuple[int, str]:
        capsys.readouterr()
        status = run_here([str(word) for word in argv])
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert status != 3, err
        return status, err

    return call


def modules() -> dict[str, ast.Module]:
    found = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "opdtool").rglob("*.py"))
    }
    assert len(found) > 50
    return found


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_module_evaluates_text_or_starts_a_shell() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "system", "popen", "literal_eval"}
    for name, tree in modules().items():
        for call in calls(tree):
            called = call.func
            if isinstance(called, ast.Name):
                assert called.id not in forbidden, f"{name}:{call.lineno}"
            elif isinstance(called, ast.Attribute):
                owner = ast.unparse(called.value)
                is_regex = owner == "re" and called.attr == "compile"
                assert called.attr not in forbidden or is_regex, f"{name}:{call.lineno}"
            shell = [word for word in call.keywords if word.arg == "shell"]
            assert not shell, f"{name}:{call.lineno}"


def test_no_file_is_unpickled() -> None:
    loads = 0
    for name, tree in modules().items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for module in ("pickle", "cPickle", "dill", "shelve", "marshal", "cloudpickle"):
                assert module not in names or name in BETWEEN_RANKS, f"{name} imports {module}"
        for call in calls(tree):
            words = {word.arg: ast.unparse(word.value) for word in call.keywords}
            called = ast.unparse(call.func)
            if called == "torch.load":
                loads += 1
                assert words.get("weights_only") == "True", f"{name}:{call.lineno}"
            assert words.get("allow_pickle", "False") == "False", f"{name}:{call.lineno}"
            assert called not in ("np.load", "numpy.load"), f"{name}:{call.lineno}"
    assert loads == 1


@pytest.fixture
def packs(tmp_path: Path, run: Run) -> Path:
    out = tmp_path / "packs"
    assert run("pack", BATCH, "-o", out, "--cp", 2, "--max-tokens", 256, "-q")[0] == 0
    return out


def edit(packs: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a pack."""
    path = packs / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def rename_first(name: str) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        first = sorted(manifest["files"])[0]
        manifest["files"][name] = manifest["files"].pop(first)

    return change


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "..", ".", "", "a\0b", "a\\b"]
)
def test_a_manifest_leads_nowhere_but_its_directory(packs: Path, run: Run, name: str) -> None:
    edit(packs, rename_first(name))
    for line in (["unpack", packs, "-o", packs.parent / "out"], ["inspect", packs]):
        status, err = run(*line)
        assert status == 2
        assert "is not the name of a file beside it" in err
    assert run("verify-pack", packs, "--batch", BATCH)[0] == 2
    assert not (packs.parent / "out").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_leads_nowhere_but_its_directory(tmp_path: Path, run: Run, name: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save(tmp_path / "secret.safetensors", {"lm_head.weight": torch.ones(8, 4)})
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "config.json").write_text("{}")
    payload = save(tmp_path / "p.safetensors", {"teacher_full_hidden_states": torch.ones(1, 2, 4)})
    for line in (["inspect", model], ["reconstruct", payload, "--head", model]):
        status, err = run(*line)
        assert status == 2
        assert "is not a file of its directory" in err


def test_a_shard_that_is_a_link_out_of_its_directory_is_refused(tmp_path: Path, run: Run) -> None:
    model = tmp_path / "model"
    model.mkdir()
    secret = save(tmp_path / "secret.safetensors", {"lm_head.weight": torch.ones(8, 4)})
    (model / "shard.safetensors").symlink_to(secret)
    index = {"weight_map": {"lm_head.weight": "shard.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    status, err = run("inspect", model)
    assert status == 2
    assert "is a link out of its directory" in err


def test_a_pack_file_that_is_a_link_is_not_read(packs: Path, run: Run) -> None:
    first = sorted(packs.glob("*.safetensors"))[0]
    moved = first.rename(packs.parent / "moved.safetensors")
    first.symlink_to(moved)
    status, err = run("unpack", packs, "-o", packs.parent / "out.safetensors")
    assert status == 2
    assert "is not a regular file" in err


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("batch", "rows", value=1), "of a batch that has 1 by its manifest"),
        (put("batch", "rows", value=0), "of a batch that has 0 by its manifest"),
        (put("batch", "rows", value=1 << 50), "larger than the system allows"),
        (put("batch", "rows", value=1 << 62), "larger than the system allows"),
        (put("batch", "rows", value=1 << 80), "a count is expected"),
        (put("batch", "width", value=3), "in a batch of width 3 by its manifest"),
        (put("batch", "width", value=1 << 50), "larger than the system allows"),
        (put("geometry", "cp", value=1), "lists 8 files for 4 microbatches and cp 1"),
        (put("geometry", "cp", value=0), "missing or malformed"),
        (put("geometry", "cp", value=True), "missing or malformed"),
        (put("geometry", "cp", value=10**18), "lists 8 files for 4 microbatches and cp 1000"),
        (put("geometry", value={}), "missing or malformed"),
        (put("extra", "microbatches", value=-1), "missing or malformed"),
        (put("extra", "microbatches", value=10**18), "lists 8 files for 1000"),
        (put("extra", "dropped_rows", value="x"), "missing or malformed"),
        (put("extra", "token_aligned", value=["none"]), "no tensor none"),
        (put("extra", "token_aligned", value=["input_ids", "input_ids"]), "malformed"),
        (put("extra", "row_aligned", value=["input_ids"]), "malformed"),
        (put("files", value={}), "is not in the manifest"),
    ],
)
def test_a_manifest_that_lies_is_refused_before_anything_is_made_of_its_numbers(
    packs: Path, run: Run, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    edit(packs, change)
    out = packs.parent / "out.safetensors"
    status, err = run("unpack", packs, "-o", out)
    assert status == 2
    assert says in err
    for memory in ("64", "1GiB"):
        assert run("unpack", packs, "-o", out, "--max-memory", memory)[0] == 2
    assert not out.exists()
    assert leftovers(packs.parent) == []
    assert run("verify-pack", packs, "--batch", BATCH)[0] in (0, 1, 2)
    assert run("inspect", packs)[0] in (0, 1, 2)


@pytest.mark.parametrize("value", ["x", 2.0, [], True, -1])
@pytest.mark.parametrize("name", ["cp", "tp", "pad_multiple", "tail", "fp8", "sequence_parallel"])
def test_a_geometry_of_other_types_is_never_an_internal_error(
    packs: Path, run: Run, name: str, value: object
) -> None:
    edit(packs, put("geometry", name, value=value))
    status = run("verify-pack", packs, "--batch", BATCH)[0]
    assert status == 2 or (name == "sequence_parallel" and value is True)


def test_a_row_that_is_packed_twice_is_refused(packs: Path, run: Run) -> None:
    import hashlib

    for path in sorted(packs.glob("pack-00001.*")):
        tensors = load_file(path)
        tensors["sequence_index"][0] = load_file(packs / "pack-00000.cp0of2.safetensors")[
            "sequence_index"
        ][0]
        save(path, tensors)
        raw = path.read_bytes()

        def change(manifest: dict[str, Any], path: Path = path, raw: bytes = raw) -> None:
            manifest["files"][path.name]["sha256"] = hashlib.sha256(raw).hexdigest()
            manifest["files"][path.name]["size"] = len(raw)

        edit(packs, change)
    status, err = run("unpack", packs, "-o", packs.parent / "out.safetensors")
    assert status == 2
    assert "is packed twice" in err


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_output_that_is_a_link_is_replaced_and_never_followed(
    tmp_path: Path, run: Run, kind: str
) -> None:
    target = tmp_path / "precious"
    if kind == "file":
        target.write_text("precious")
    else:
        target.mkdir()
        (target / "file").write_text("precious")
    before = contents(target)
    out = tmp_path / "out.safetensors"
    out.symlink_to(target)
    line = (
        ["build-mask", BATCH, "-o", out, "-q"]
        if kind == "file"
        else ["pack", BATCH, "-o", out, "-q"]
    )
    status, err = run(*line)
    assert status == 2
    assert "exists" in err
    assert run(*line, "--force")[0] == 0
    assert not out.is_symlink()
    assert contents(target) == before
    assert leftovers(tmp_path) == []


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, run: Run) -> None:
    victim = tmp_path / "victim"
    (tmp_path / ".out.safetensors.lock").symlink_to(victim)
    status, err = run("build-mask", BATCH, "-o", tmp_path / "out.safetensors")
    assert status == 2
    assert "cannot be written" in err
    assert not victim.exists()


def test_the_temporary_name_cannot_be_guessed(tmp_path: Path, run: Run) -> None:
    from opdtool.io.atomic import Target

    names = set()
    for _ in range(2):
        target = Target(tmp_path / "out", force=False, directory=False)
        names.add(target.temporary.name)
        target.release()
    assert len(names) == 2
    assert all(str(os.getpid()) in name for name in names)


@pytest.mark.parametrize(
    "header",
    [
        b'{"input_ids":{"dtype":"I64","shape":[1125899906842624],"data_offsets":[0,8]}}',
        b'{"input_ids":{"dtype":"I64","shape":[1],"data_offsets":[0,9007199254740992]}}',
        b'{"input_ids":{"dtype":"I64","shape":[4294967296,4294967296],"data_offsets":[0,8]}}',
        b'{"input_ids":{"dtype":"I64","shape":[0,1125899906842624],"data_offsets":[0,0]}}',
    ],
)
def test_sizes_are_checked_before_anything_is_allocated(
    tmp_path: Path, run: Run, header: bytes
) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    for line in (
        ["pack", path, "-o", tmp_path / "out"],
        ["build-mask", path, "-o", tmp_path / "out.safetensors"],
        ["verify-d2t", path],
        ["inspect", path],
        ["compare", path, path],
        ["roll", path, "--name", "input_ids", "-o", tmp_path / "out.safetensors"],
    ):
        status, err = run(*line)
        if "[0," in header.decode() and line[0] in ("inspect", "compare"):
            assert status in (0, 1, 2)  # a shape with a zero is no lie
            continue
        assert status == 2, line
        assert "huge.safetensors" in err or "d2t" in err
    header_size = tmp_path / "header.safetensors"
    header_size.write_bytes(struct.pack("<Q", 1 << 50) + b"{}")
    status, err = run("inspect", header_size)
    assert status == 2
    assert "header.safetensors" in err


def test_a_vocabulary_and_a_memory_of_any_size_are_not_allocated(tmp_path: Path, run: Run) -> None:
    batch = save(tmp_path / "b.safetensors", a_batch(3, 8))
    out = tmp_path / "d2t.safetensors"
    line = ["build-d2t", batch, "-o", out, "--draft-vocab-size", 4, "--vocab-size", 1 << 50]
    assert run(*line)[0] == 2
    assert run("pack", batch, "-o", tmp_path / "p", "--max-memory", "1000000TiB", "-q")[0] == 0
    assert run("pack", batch, "-o", tmp_path / "q", "--pad-packed-to", 1 << 50, "-q")[0] == 2
    assert run("pack", batch, "-o", tmp_path / "r", "--cp", 1 << 40, "-q")[0] == 2
    assert not any((tmp_path / name).exists() for name in "qr")
