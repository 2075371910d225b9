"""Files that belong together: wherever a run is killed, the next one finds all or none."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from opdtool.core.errors import InputError
from opdtool.io.atomic import Target
from opdtool.io.fileset import FileSet, journal_of, recover
from opdtool.io.writer import TensorSpec
from tests.robust.conftest import Server, a_batch, leftovers, save
from tests.robust.server import CALLS


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("batch") / "batch.safetensors", a_batch(20, 64))


def line(batch: Path, folder: Path, cp: int, multiple: int = 8) -> list[object]:
    geometry = ["--cp", cp, "--pad-multiple", multiple]
    return ["build-mask", batch, "-o", folder / "mask.safetensors", *geometry]


def files(folder: Path) -> dict[str, bytes]:
    """The files under final names."""
    return {path.name: path.read_bytes() for path in folder.glob("mask.cp*.safetensors")}


def made(run: Server, batch: Path, folder: Path, cp: int, multiple: int = 8) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    folder.mkdir()
    assert run(*line(batch, folder, cp, multiple)).status == 0
    found = files(folder)
    assert len(found) == cp
    assert leftovers(folder) == []
    return found


RENAMES = ("link", "rename", "replace")
EACH = pytest.mark.parametrize(
    ("cp", "calls"), [(2, RENAMES), pytest.param(3, CALLS, marks=pytest.mark.slow)]
)


@EACH
def test_a_run_killed_before_any_rename_of_a_set_leaves_room_for_the_next_one(
    cp: int, calls: Sequence[str], tmp_path: Path, run: Server, batch: Path
) -> None:
    multiple = 6 * cp
    right = made(run, batch, tmp_path / "right", cp, multiple)
    folder, killed, halves = tmp_path / "out", 0, 0
    folder.mkdir()
    for call in itertools.count():
        ended = run(*line(batch, folder, cp, multiple), dies_before=call, calls=calls)
        if ended.status == 0:
            break
        killed += 1
        assert ended.status == -signal.SIGKILL
        found = files(folder)
        assert found.items() <= right.items()
        halves += 0 < len(found) < cp
        done = len(found) == cp and not journal_of(folder / "mask.safetensors").exists()
        if 0 < len(found) < cp:  # what reads them says so, and does not judge a half
            told = run("verify-mask", folder, "--batch", batch, "--pad-multiple", multiple)
            assert told.status == 2
        again = run(*line(batch, folder, cp, multiple), *(["--force"] if done else []))
        assert again.status == 0, (call, again.err)
        assert files(folder) == right
        assert leftovers(folder) == []
        for path in folder.iterdir():
            path.unlink()
    assert killed >= cp + 1
    assert halves >= cp - 1
    assert files(folder) == right


@EACH
def test_a_run_killed_while_it_replaces_a_set_is_finished_by_the_next_one(
    cp: int, calls: Sequence[str], tmp_path: Path, run: Server, batch: Path
) -> None:
    old = made(run, batch, tmp_path / "old", cp, 2 * cp)
    new = made(run, batch, tmp_path / "new", cp, 8 * cp)
    assert all(old[name] != new[name] for name in old)
    folder, mixed = tmp_path / "out", 0
    folder.mkdir()
    for call in itertools.count():
        for name, data in old.items():
            (folder / name).write_bytes(data)
        ended = run(*line(batch, folder, cp, 8 * cp), "--force", dies_before=call, calls=calls)
        if ended.status == 0:
            break
        found = files(folder)
        assert all(found[name] in (old[name], new[name]) for name in old)
        if found not in (old, new):
            mixed += 1
            told = run("verify-mask", folder, "--batch", batch, "--pad-multiple", 8 * cp)
            assert told.status == 2
            assert "was killed" in told.err
            refused = run(*line(batch, folder, cp, 8 * cp))  # without --force: finished, and kept
            assert refused.status == 2
            assert files(folder) == new
        again = run(*line(batch, folder, cp, 8 * cp), "--force")
        assert again.status == 0, again.err
        assert files(folder) == new
        assert leftovers(folder) == []
    assert mixed >= 1


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_set_is_whole_or_absent_whenever_its_run_is_ended(
    sent: signal.Signals, tmp_path: Path, run: Server, batch: Path
) -> None:
    right = made(run, batch, tmp_path / "right", 2)
    seconds = run(*line(batch, tmp_path / "right", 2), "--force").seconds
    folder, ended_early = tmp_path / "out", 0
    folder.mkdir()
    for i in range(40):
        ended = run(*line(batch, folder, 2), after=seconds * 1.1 * i / 40, signal=sent)
        ended_early += ended.status != 0
        found = files(folder)
        assert found.items() <= right.items()
        if sent != signal.SIGKILL:
            assert found in ({}, right)
            assert leftovers(folder) == []
        # Behind the last name a killed run may still leave the locks, which no longer matter.
        done = found == right and not any(name.endswith(".set") for name in leftovers(folder))
        again = run(*line(batch, folder, 2), *(["--force"] if done else []))
        assert again.status == 0, again.err
        assert files(folder) == right
        assert leftovers(folder) == []
        for path in folder.iterdir():
            path.unlink()
    assert ended_early > 10


SPECS = [TensorSpec("x", "U8", (0,))]


def begin(folder: Path, *, force: bool = False) -> FileSet:
    """A set of two files, filled and not yet finished."""
    paths = [folder / f"mask.cp{rank}of2.safetensors" for rank in range(2)]
    opened = FileSet(folder / "mask.safetensors", paths, force=force)
    for path in paths:
        opened.tensor_file(path, SPECS)
    return opened


def test_a_name_that_is_taken_meanwhile_is_kept_and_the_set_taken_back(tmp_path: Path) -> None:
    theirs = tmp_path / "mask.cp1of2.safetensors"
    with begin(tmp_path) as out:
        theirs.write_text("somebody's")
        with pytest.raises(InputError, match="appeared while this run was at work"):
            out.finish()
    assert [path.name for path in tmp_path.iterdir()] == [theirs.name]
    assert theirs.read_text() == "somebody's"


def test_two_runs_cannot_write_one_set(tmp_path: Path) -> None:
    with begin(tmp_path) as out:
        with pytest.raises(InputError, match="another run is writing it"):
            begin(tmp_path)
        out.finish()
    assert len(list(tmp_path.iterdir())) == 2
    assert leftovers(tmp_path) == []


def test_a_file_put_there_since_is_not_taken_for_one_of_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    out = begin(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Target, "move_in", lambda target: (_ for _ in ()).throw(SystemExit))
        patched.setattr("opdtool.io.fileset.write_text_atomic", write_journal)
        patched.setattr("opdtool.io.fileset._make_whole", lambda journal: None)
        with pytest.raises(SystemExit):
            out.finish()
    assert journal_of(tmp_path / "mask.safetensors").exists()
    theirs = tmp_path / "mask.cp0of2.safetensors"
    theirs.write_text("somebody's")
    out.__exit__(None, None, None)
    recover(tmp_path / "mask.safetensors")
    assert theirs.read_text() == "somebody's"
    assert leftovers(tmp_path) == []


def write_journal(path: Path, text: str, *, force: bool) -> None:
    path.write_text(text)


JUNK: list[object] = [
    {},
    [],
    {"replaces": False, "files": [{"name": "../precious", "built": ".../x", "is": [1, 2, 3, 4]}]},
    {"replaces": True, "files": [{"name": "precious", "built": "other", "is": [1, 2, 3, 4]}]},
    {"replaces": "yes", "files": []},
    {"replaces": False, "files": [{"name": "precious", "built": ".precious.tmp-1", "is": "no"}]},
]


@pytest.mark.parametrize("told", [*JUNK, "no json", "[" * 100_000])
def test_a_journal_that_was_not_written_here_touches_nothing(told: object, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for precious in (tmp_path / "precious", folder / "precious", folder / "other"):
        precious.write_text("kept")
    journal = journal_of(folder / "mask.safetensors")
    journal.write_text(told if isinstance(told, str) else json.dumps(told))
    recover(folder / "mask.safetensors")
    assert not journal.exists()
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"kept"}


def test_a_journal_that_is_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text('{"replaces": false, "files": []}')
    os.symlink(precious, journal_of(tmp_path / "mask.safetensors"))
    recover(tmp_path / "mask.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
