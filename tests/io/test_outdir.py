"""Directory outputs: whole or absent, whatever happens to the run."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.io.manifest import make_manifest, read_manifest
from opdtool.io.outdir import OutputDir, OutputPart
from opdtool.io.verify import verify_files
from opdtool.io.writer import TensorSpec
from tests.io.test_writer import listing


def build(path: Path, value: float, *, force: bool = False, files: int = 2) -> None:
    """A directory of ``files`` files that all hold ``value``."""
    with OutputDir(path, force=force) as out:
        for number in range(files):
            out.save_tensors(f"{number}.safetensors", {"x": torch.full((50,), value)})
        out.finish(manifest(out, value))


def manifest(out: OutputDir, value: float = 0.0) -> str:
    """A manifest of what is in ``out``."""
    return make_manifest(
        "pack", geometry={"cp": 1, "value": value}, files=out.files, inputs=[]
    ).to_json()


def held(path: Path) -> float:
    """The value that a whole directory holds; an assertion fails when it is not whole."""
    found = read_manifest(path)
    assert len(found.files) == 2
    assert verify_files(path, found) == []
    value = found.geometry["value"]
    assert isinstance(value, float)
    return value


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    with OutputDir(tmp_path / "deep" / "out") as out:
        out.save_tensors("b.safetensors", {"x": torch.ones(2)})
        with out.tensor_file("a.safetensors", [TensorSpec("y", "I64", (3,))]) as file:
            file.write("y", torch.arange(3))
        out.write_text("notes.txt", "text\n")
        assert not (tmp_path / "deep" / "out").exists()
        assert [file.name for file in out.files] == ["a.safetensors", "b.safetensors"]
        out.finish(manifest(out))
    assert listing(tmp_path / "deep") == ["out"]
    assert listing(tmp_path / "deep" / "out") == [
        "a.safetensors", "b.safetensors", "manifest.json", "notes.txt",
    ]  # fmt: skip
    assert verify_files(tmp_path / "deep" / "out", read_manifest(tmp_path / "deep" / "out")) == []


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(tmp_path / name, 3.0)
    names = listing(tmp_path / "one")
    assert len(names) == 3
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_an_error_or_an_unfinished_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), OutputDir(tmp_path / "out") as out:  # noqa: PT012
        out.save_tensors("a.safetensors", {"x": torch.ones(2)})
        out.tensor_file("b.safetensors", [TensorSpec("y", "I64", (3,))])
        raise KeyboardInterrupt
    with OutputDir(tmp_path / "out") as out:
        out.save_tensors("a.safetensors", {"x": torch.ones(2)})
    assert listing(tmp_path) == []


def test_an_existing_directory_is_kept_without_force(tmp_path: Path) -> None:
    build(tmp_path / "out", 1.0)
    with pytest.raises(InputError, match="out: exists; pass --force"):
        build(tmp_path / "out", 2.0)
    assert held(tmp_path / "out") == 1.0
    build(tmp_path / "out", 2.0, force=True)
    assert held(tmp_path / "out") == 2.0
    assert listing(tmp_path) == ["out"]


def test_an_empty_directory_is_no_obstacle_and_a_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(tmp_path / "out", 1.0)
    assert held(tmp_path / "out") == 1.0
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file: is a file; a directory is to be written there"):
        build(tmp_path / "file", 1.0, force=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_link_to_a_directory_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    build(tmp_path / "real", 1.0)
    os.symlink(tmp_path / "real", tmp_path / "out")
    with pytest.raises(InputError, match="exists"):
        build(tmp_path / "out", 2.0)
    build(tmp_path / "out", 2.0, force=True)
    assert held(tmp_path / "out") == 2.0
    assert held(tmp_path / "real") == 1.0
    assert listing(tmp_path) == ["out", "real"]


def test_of_two_runs_at_once_one_wins_and_the_other_is_told(tmp_path: Path) -> None:
    with OutputDir(tmp_path / "out") as first:
        first.save_tensors("0.safetensors", {"x": torch.ones(2)})
        for force in (False, True):
            with pytest.raises(InputError, match="another run is writing it now"):
                build(tmp_path / "out", 2.0, force=force)
        first.save_tensors("1.safetensors", {"x": torch.ones(2)})
        first.finish(manifest(first, 1.0))
    assert held(tmp_path / "out") == 1.0
    assert listing(tmp_path) == ["out"]


def test_a_directory_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(InputError, match="appeared while this run was at work"),
        OutputDir(tmp_path / "out") as out,
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
        out.finish(manifest(out))
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["theirs"]


def test_what_killed_runs_left_is_swept_and_an_old_output_put_back(tmp_path: Path) -> None:
    build(tmp_path / "old", 1.0)
    os.rename(tmp_path / "old", tmp_path / ".out.old-999-abcd")  # killed between two renames
    (tmp_path / ".out.tmp-999-abcd").mkdir()
    (tmp_path / ".out.tmp-999-abcd" / "half").write_text("x")
    (tmp_path / ".out.lock").write_text("")
    (tmp_path / ".other.tmp-999-abcd").mkdir()
    with pytest.raises(InputError, match="exists"):
        build(tmp_path / "out", 2.0)
    assert held(tmp_path / "out") == 1.0
    build(tmp_path / "out", 2.0, force=True)
    assert held(tmp_path / "out") == 2.0
    assert listing(tmp_path) == [".other.tmp-999-abcd", "out"]


def test_other_processes_write_their_parts(tmp_path: Path) -> None:
    with OutputDir(tmp_path / "out") as out:
        out.save_tensors("0.safetensors", {"x": torch.ones(2)})
        part = OutputPart(out.work)
        part.save_tensors("1.safetensors", {"x": torch.zeros(2)})
        out.add_records(part.records())
        out.finish(manifest(out, 5.0))
    assert held(tmp_path / "out") == 5.0


def test_a_name_that_leads_elsewhere_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with OutputDir(tmp_path / "out") as out:
        for name in ("../x", "a/b", "", ".."):
            with pytest.raises(ValueError, match="no plain file name"):
                out.save_tensors(name, {"x": torch.ones(1)})


def test_a_run_killed_at_any_moment_leaves_nothing_partial(tmp_path: Path) -> None:
    """Children replace a directory over and over until they are killed, a hundred times."""
    chance = random.Random(7)
    path, seen = tmp_path / "out", set()
    for _ in range(100):
        child = os.fork()
        if child == 0:
            try:
                value = 0.0
                while True:
                    value += 1.0
                    build(path, value, force=True)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.005, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        if path.exists():
            seen.add(held(path))
    build(path, 99.5, force=True)
    assert held(path) == 99.5
    assert len(seen) > 1
    assert listing(tmp_path) == ["out"]
