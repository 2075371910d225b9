"""Full disks, read-only places, outputs in the way, runs at once, inputs that change."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from opdtool.cli.main import run as run_here
from opdtool.io.atomic import Target
from tests.robust.conftest import FIXTURES, Ended, Server, a_batch, contents, leftovers, save
from tests.robust.test_crashes import EACH, Jobs
from tests.robust.test_crashes import jobs as jobs
from tests.robust.test_crashes import undisturbed as undisturbed

READERS = (
    "pack",
    "build-mask",
    "build-d2t",
    "reconstruct",
    "map-d2t",
    "inspect",
    "compare",
    "verify-mask",
)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``mounted("size=64k")`` is a fresh file system of its own."""
    with ExitStack() as stack:

        def mount(options: str) -> Path:
            place = tmp_path / f"mount-{len(os.listdir(tmp_path))}"
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
            return place

        yield mount


def refused(ended: Ended, *words: str) -> None:
    """The command ended with 2 and one line or two that say all the words."""
    assert ended.status == 2, ended
    assert ended.err.startswith("error: ")
    assert len(ended.err.splitlines()) <= 2
    assert ended.out == ""
    for word in words:
        assert word in ended.err


@EACH
def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    command: str, jobs: Jobs, run: Server, mounted: Callable[[str], Path]
) -> None:
    place = mounted("size=16k")
    (place / "ballast").write_bytes(b"x" * (16 << 10))
    out = jobs.output(command, place)
    refused(run(*jobs.argv(command, out)), str(out), "the disk is full")
    assert [each.name for each in place.iterdir()] == ["ballast"]


@pytest.mark.parametrize("command", ["pack", "unpack", "reconstruct"])
def test_a_disk_that_fills_up_half_way_keeps_the_old_output(
    command: str,
    jobs: Jobs,
    run: Server,
    mounted: Callable[[str], Path],
    undisturbed: Callable[[str, bool], object],
) -> None:
    place = mounted("size=12m")
    out = jobs.output(command, place)
    assert run(*jobs.argv(command, out)).status == 0
    before = contents(out)
    free = os.statvfs(place)
    (place / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_frsize - (64 << 10)))
    ended = run(*jobs.argv(command, out, True), "--force")
    refused(ended, "the disk is full")
    assert contents(out) == before
    assert leftovers(place) == []
    (place / "ballast").unlink()
    assert run(*jobs.argv(command, out, True), "--force").status == 0
    assert contents(out) != before


@EACH
def test_a_file_larger_than_the_system_allows_is_a_sentence_and_leaves_nothing(
    command: str, jobs: Jobs, run: Server, tmp_path: Path
) -> None:
    out = jobs.output(command, tmp_path)
    limits = {"RLIMIT_FSIZE": 700}
    refused(run(*jobs.argv(command, out), limits=limits), "larger than the system allows")
    assert list(tmp_path.iterdir()) == []


@EACH
def test_a_read_only_file_system_is_a_sentence(
    command: str, jobs: Jobs, run: Server, mounted: Callable[[str], Path]
) -> None:
    out = jobs.output(command, mounted("ro"))
    refused(run(*jobs.argv(command, out)), str(out), "the file system is read-only")


@EACH
def test_a_directory_that_may_not_be_written_is_a_sentence(
    command: str, jobs: Jobs, run: Server, tmp_path: Path
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    out = jobs.output(command, locked)
    refused(run(*jobs.argv(command, out), plain=True), str(out), "permission denied")
    assert list(locked.iterdir()) == []


@EACH
def test_an_output_that_is_in_the_way_is_kept(
    command: str, jobs: Jobs, run: Server, tmp_path: Path
) -> None:
    out = jobs.output(command, tmp_path)
    assert run(*jobs.argv(command, out)).status == 0
    before = contents(out)
    refused(run(*jobs.argv(command, out, True)), str(out), "exists", "--force")
    assert contents(out) == before

    other = tmp_path / f"other{out.suffix}"
    if out.is_dir():
        other.write_text("precious")
        refused(run(*jobs.argv(command, other), "--force"), str(other), "is a file")
        assert other.read_text() == "precious"
    else:
        other.mkdir()
        refused(run(*jobs.argv(command, other), "--force"), str(other), "is a directory")
    below = (tmp_path / "plain") / out.name
    below.parent.write_text("a file")
    refused(run(*jobs.argv(command, below)), str(below), "a part of the path is a file")
    assert leftovers(tmp_path) == []


@EACH
def test_parents_of_an_output_are_made(
    command: str, jobs: Jobs, run: Server, tmp_path: Path
) -> None:
    out = jobs.output(command, tmp_path / "a" / "b")
    assert run(*jobs.argv(command, out)).status == 0
    assert out.exists()


@EACH
def test_a_second_run_into_one_output_is_told_to_wait(
    command: str, jobs: Jobs, run: Server, tmp_path: Path
) -> None:
    out = jobs.output(command, tmp_path)
    first = Target(out, force=False, directory=out.suffix == "")
    try:
        for force in ([], ["--force"]):
            refused(run(*jobs.argv(command, out), *force), str(out), "another run is writing it")
    finally:
        first.release()
    assert run(*jobs.argv(command, out)).status == 0
    assert leftovers(tmp_path) == []


def test_of_runs_at_once_into_one_directory_one_wins_and_its_output_is_whole(
    jobs: Jobs, run: Server, tmp_path: Path
) -> None:
    right = contents_after(run, jobs, tmp_path / "right")
    servers = [run, Server()]
    try:
        for i in range(3):
            out = tmp_path / f"out{i}"
            for server in servers:
                server.begin(*jobs.argv("pack", out))
            ended = [server.end() for server in servers]
            assert sorted(each.status for each in ended) == [0, 2], ended
            loser = next(each for each in ended if each.status == 2)
            refused(loser, str(out))
            assert contents(out) == right
    finally:
        servers[1].close()
    assert leftovers(tmp_path) == []


def contents_after(run: Server, jobs: Jobs, out: Path) -> dict[str, bytes] | bytes | None:
    """What pack writes into a directory of this name."""
    assert run(*jobs.argv("pack", out)).status == 0
    return contents(out)


@pytest.fixture
def preads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int, Callable[[], object]], None]:
    """``preads(path, n, act)`` acts just before the file is read for the n-th time."""

    def arrange(path: Path, when: int, act: Callable[[], object]) -> None:
        inode, seen, plain = path.stat().st_ino, [0], os.preadv

        def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
            if os.fstat(fd).st_ino == inode:
                seen[0] += 1
                if seen[0] == when:
                    act()
            return plain(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)

    return arrange


def line_for(command: str, path: Path, out: Path) -> list[object]:
    """A command line that reads ``path``, a batch or the payload."""
    heads = ["--head", f"0={FIXTURES}/teacher-a", "--head", f"1={FIXTURES}/teacher-b"]
    lines: dict[str, list[object]] = {
        "pack": [path, "-o", out, "--max-tokens", 256],
        "build-mask": [path, "-o", out.with_suffix(".safetensors")],
        "build-d2t": [
            *[path, "-o", out.with_suffix(".safetensors")],
            *["--draft-vocab-size", 8, "--vocab-size", 512],
        ],
        "reconstruct": [path, *heads, "-o", out],
        "map-d2t": [path, "--d2t", FIXTURES / "draft", "-o", out.with_suffix(".safetensors")],
        "inspect": [path],
        "compare": [path, path.with_name("copy.safetensors")],
        "verify-mask": [path.with_name("mask.safetensors"), "--batch", path],
    }
    return [command, *lines[command]]


def input_for(command: str, folder: Path) -> Path:
    """A fresh copy of what the command reads."""
    names = {"reconstruct": "teacher_hidden", "map-d2t": "teacher_logits"}
    path = folder / "input.safetensors"
    shutil.copyfile(FIXTURES / f"{names.get(command, 'batch')}.safetensors", path)
    shutil.copyfile(path, folder / "copy.safetensors")
    if command == "verify-mask":
        mask = folder / "mask.safetensors"
        assert run_here(["build-mask", str(path), "-o", str(mask), "-q"]) == 0
    return path


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("how", ["truncated", "written to", "grown"])
def test_an_input_that_changes_while_it_is_read_is_refused_and_nothing_is_written(
    command: str,
    how: str,
    tmp_path: Path,
    preads: Callable[[Path, int, Callable[[], object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = input_for(command, tmp_path)
    before = sorted(each.name for each in tmp_path.iterdir())
    size = path.stat().st_size
    changed = []

    def change() -> None:
        changed.append(how)
        if how == "truncated":
            os.truncate(path, size // 2)
        elif how == "written to":
            with path.open("r+b") as file:
                file.seek(size - 1)
                file.write(b"\x01")
        else:
            with path.open("ab") as file:
                file.write(b"more")
        stamp = path.stat().st_mtime_ns + 1_000_000_000  # however coarse the clock is
        os.utime(path, ns=(stamp, stamp))

    # The header is read in two pieces; then its tensors.
    preads(path, 3, change)
    capsys.readouterr()
    status = run_here([str(word) for word in line_for(command, path, tmp_path / "out")])
    out, err = capsys.readouterr()
    assert changed == [how]
    assert status == 2, (out, err)
    assert str(path) in err
    assert "while being read; wait until it is complete and run again" in err
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def test_an_input_that_is_replaced_while_it_is_read_is_read_as_it_was(
    tmp_path: Path,
    preads: Callable[[Path, int, Callable[[], object]], None],
) -> None:
    path = input_for("pack", tmp_path)
    right = load_file(path)
    other = save(tmp_path / "other.safetensors", a_batch(3, 7))
    preads(path, 3, lambda: os.replace(other, path))
    assert run_here(["pack", str(path), "-o", str(tmp_path / "out"), "-q"]) == 0
    assert not other.exists()
    packed = load_file(tmp_path / "out" / "pack-00000.safetensors")
    rows = right["input_lengths"].tolist()
    want = [id for row, n in zip(right["input_ids"].tolist(), rows, strict=True) for id in row[:n]]
    assert packed["input_ids"][0].tolist() == want


def test_a_missing_input_is_a_sentence(run: Server, tmp_path: Path) -> None:
    for command in READERS:
        ended = run(*line_for(command, tmp_path / "none.safetensors", tmp_path / "out"))
        refused(ended, "none.safetensors: no such file; check the path")
    assert list(tmp_path.iterdir()) == []


def test_a_run_survives_the_loss_of_its_terminal_only_as_long_as_it_is_told(
    jobs: Jobs, run: Server, tmp_path: Path
) -> None:
    # A hang-up is what a closed terminal sends: the run dies, and the next one finds its way.
    out = tmp_path / "out"
    ended = run(*jobs.argv("pack", out), after=0.05, signal=signal.SIGHUP)
    assert ended.status in (-signal.SIGHUP, 0)
    assert contents(out) is None or ended.status == 0
    assert run(*jobs.argv("pack", out), "--force").status == 0
    assert leftovers(tmp_path) == []


LONG = "x" * 400 + ".safetensors"
"""More letters than a file name may have."""


@pytest.mark.parametrize(
    "line",
    [
        f"pack {LONG} -o out",
        f"pack {{batch}} -o {LONG}",
        f"unpack {LONG} -o out",
        f"verify-pack {LONG} --batch {{batch}}",
        f"build-mask {LONG} -o out.safetensors",
        f"verify-mask {LONG} --batch {{batch}}",
        f"build-d2t {LONG} --vocab-size 4 --draft-vocab-size 2 -o out",
        f"verify-d2t {LONG}",
        f"map-d2t {LONG} --d2t {LONG} -o out",
        f"reconstruct {{hidden}} --head {LONG}",
        f"reconstruct {{hidden}} --head {{teacher}} --reference {LONG}",
        f"inspect {LONG}",
        f"inspect {{batch}} --report {LONG}.json",
        f"compare {LONG} {LONG}",
        f"roll {LONG} --name x -o out",
        f"rescale {LONG} --normalizers {LONG} --token-factor 1 --sequence-factor 1",
        f"convert {LONG}.pt -o out",
        f"check {LONG}",
        f"demo {LONG}",
        f"simulate {LONG}",
    ],
)
def test_a_name_too_long_for_the_system_is_a_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "batch": FIXTURES / "batch.safetensors",
        "hidden": FIXTURES / "teacher_hidden.safetensors",
        "teacher": FIXTURES / "teacher-a",
    }
    assert run_here([word.format(**given) for word in line.split()]) == 2
    said = capsys.readouterr().err
    assert LONG in said
    assert "too long" in said
    assert len(said.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []
