"""Directory outputs: whole or absent, whatever happens to the run."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.io import atomic
from opdtool.io.atomic import check_output
from opdtool.io.fileset import FileSet
from opdtool.io.manifest import make_manifest, read_manifest
from opdtool.io.outdir import OutputDir, OutputPart
from opdtool.io.verify import verify_files
from opdtool.io.writer import TensorFileWriter, TensorSpec
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


@pytest.mark.parametrize("force", [False, True])
def test_of_many_processes_at_once_one_wins_and_nothing_mixes(force: bool, tmp_path: Path) -> None:
    for turn in range(10):
        path = tmp_path / str(turn)
        gate, opener = os.pipe()
        children = []
        for number in range(6):
            child = os.fork()
            if child == 0:
                status = 3
                try:
                    os.close(opener)
                    os.read(gate, 1)  # all start together, when the pipe is closed
                    build(path, float(number), force=force)
                    status = 0
                except InputError:
                    status = 2
                finally:
                    os._exit(status)
            children.append(child)
        os.close(gate)
        os.close(opener)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(ended) <= {0, 2}
        assert ended.count(0) >= 1 if force else ended.count(0) == 1
        assert ended[int(held(path))] == 0
    assert listing(tmp_path) == sorted(str(turn) for turn in range(10))


def test_without_locks_the_last_step_still_lets_one_run_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".out.tmp-1-live").mkdir()  # it may be a living run's: it is left alone
    with (  # noqa: PT012
        pytest.raises(InputError, match="appeared"),
        OutputDir(tmp_path / "out") as out,
    ):
        build(tmp_path / "out", 2.0)
        out.finish(manifest(out))
    assert held(tmp_path / "out") == 2.0
    assert listing(tmp_path) == [".out.tmp-1-live", "out"]


def _child(path: Path, turns: int) -> int:
    """A process that replaces a directory so many times; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            for turn in range(turns):
                build(path, 1.0 + turn, force=True)
        finally:
            os._exit(0)
    return child


def test_a_run_killed_at_any_moment_leaves_nothing_partial(tmp_path: Path) -> None:
    """Children replace a directory over and over until they are killed, a hundred times."""
    chance = random.Random(7)
    path, seen = tmp_path / "out", set()
    begin = time.monotonic()
    os.waitpid(_child(path, 5), 0)
    usual = (time.monotonic() - begin) / 5
    for _ in range(100):
        child = _child(path, 10**6)
        time.sleep(usual * chance.uniform(0.1, 3.0))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        if path.exists():
            seen.add(held(path))
    build(path, 99.5, force=True)
    assert held(path) == 99.5
    assert len(seen) > 1
    assert listing(tmp_path) == ["out"]


def test_a_directory_that_holds_an_input_is_not_replaced(tmp_path: Path) -> None:
    build(tmp_path / "out", 1.0)
    held_input = tmp_path / "out" / "0.safetensors"
    with pytest.raises(InputError, match=r"holds the input .*; --force would delete it"):
        check_output(tmp_path / "out", force=True, directory=True, inputs=[held_input])
    os.symlink(tmp_path / "out", tmp_path / "link")
    with pytest.raises(InputError, match="holds the input"):
        check_output(tmp_path / "out", force=True, directory=True, inputs=[tmp_path / "link" / "x"])
    check_output(tmp_path / "out", force=True, directory=True, inputs=[tmp_path / "other"])


@pytest.mark.parametrize("place", ["here", "above", "home"])
def test_no_option_deletes_the_working_or_the_home_directory(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "precious").write_text("kept")
    if place == "home":
        monkeypatch.setenv("HOME", str(tmp_path / "a" / "b"))
    else:
        monkeypatch.chdir(tmp_path / "a" / "b")
    path = {"here": Path("."), "above": tmp_path / "a", "home": tmp_path / "a" / "b"}[place]
    with pytest.raises(InputError, match="would be deleted; name a directory inside it"):
        build(path, 1.0, force=True)
    assert (tmp_path / "a" / "b" / "precious").read_text() == "kept"


INTERRUPTED = """
import sys, time, torch
from opdtool.io import hashing
from opdtool.io.background import workers
from opdtool.io.outdir import OutputDir
for _ in range(8):
    workers().submit(time.sleep, 60)
with OutputDir(sys.argv[1]) as out:
    out.save_tensors("a.safetensors", {"x": torch.ones(3)})
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    polite = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    child = subprocess.Popen(
        [sys.executable, "-c", polite + INTERRUPTED, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert listing(tmp_path) != []
    child.send_signal(number)
    assert child.wait(timeout=20) != 0
    assert listing(tmp_path) == []


FULL = """
import os, sys, torch
from opdtool.core.errors import InputError
from opdtool.io.outdir import OutputDir
from opdtool.io.writer import save_tensors
def tried(work):
    try:
        work()
    except InputError as error:
        print(error)
    print(sorted(os.listdir(sys.argv[1])))
def directory():
    with OutputDir(sys.argv[1] + "/out") as out:
        for number in range(100):
            out.save_tensors(f"{number}.safetensors", {"x": torch.ones(50_000)})
tried(lambda: save_tensors(sys.argv[1] + "/a", {"x": torch.ones(1_000_000)}))
tried(directory)
tried(lambda: save_tensors(sys.argv[1] + "/b", {"x": torch.ones(10)}))
"""


def test_a_disk_that_is_really_full_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """In a mount namespace of its own, on a file system of one megabyte."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting needs a privilege that is not there")
    run = shlex.join([sys.executable, "-c", FULL, str(tmp_path)])
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {run}"], capture_output=True, text=True
    )
    full = "cannot be written: the disk is full; free some space or write elsewhere"
    assert done.stdout.splitlines() == [
        f"{tmp_path}/a: {full}", "[]", f"{tmp_path}/out/5.safetensors: {full}", "[]", "['b']",
    ], done.stderr  # fmt: skip


def test_a_read_only_file_system_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting needs a privilege that is not there")
    run = shlex.join([sys.executable, "-c", FULL, str(tmp_path)])
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {run}"], capture_output=True, text=True
    )
    refusal = "cannot be written: the file system is read-only; write elsewhere"
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tmp_path}/a: {refusal}", done.stderr
    assert lines[2] == f"{tmp_path}/out: {refusal}"
    assert lines[1::2] == ["['there']"] * 3


def test_a_disk_that_is_full_only_when_synced_is_a_sentence_wherever_the_hash_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "work").mkdir()
    part = OutputPart(tmp_path / "work", tmp_path / "out")
    part.save_tensors("x.safetensors", {"x": torch.ones(3)})
    reason = r"out/x\.safetensors: cannot be written: the disk is full"
    with pytest.raises(InputError, match=reason):
        part.records()
    with pytest.raises(InputError, match=reason):
        make_manifest("pack", geometry={}, files=part.files, inputs=[])
    with pytest.raises(InputError, match=reason.replace("x", "0", 1)):
        build(tmp_path / "out", 1.0)
    assert listing(tmp_path) == ["work"]


SENT = """
import os, signal, sys, threading, time
from opdtool.io.atomic import undisturbed

busy = threading.Thread(target=time.sleep, args=(30,), daemon=True)
busy.start()  # a thread that may take the signal in place of the main one
done = []
NUMBER = getattr(signal, sys.argv[1])
class Ended(Exception):
    pass
def handler(number, frame):
    raise Ended
signal.signal(NUMBER, handler)
try:
    with undisturbed():
        os.kill(os.getpid(), NUMBER)
        for _ in range(50):  # time for a handler to run in
            time.sleep(0.01)
        done.append("whole")
    time.sleep(0.01)
    done.append("not ended")
except Ended:
    done.append("ended")
assert signal.getsignal(NUMBER) is handler
print(done)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_waits_until_a_lock_is_whole_though_another_thread_could_take_it(
    name: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SENT, name], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "['whole', 'ended']\n", done.stderr


def test_a_signal_that_kills_kills_once_the_lock_is_whole() -> None:
    script = SENT.replace("signal.signal(NUMBER, handler)", "signal.signal(NUMBER, signal.SIG_DFL)")
    script = script.replace('done.append("whole")', 'print("whole", flush=True)')
    done = subprocess.run(
        [sys.executable, "-c", script, "SIGTERM"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("whole\n", -signal.SIGTERM)


@pytest.mark.parametrize("kind", ["directory", "file", "set"])
def test_a_signal_while_an_output_is_given_up_leaves_no_lock(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [TensorSpec("x", "F32", (1,))]
    makers: dict[str, Callable[[], Any]] = {
        "directory": lambda: OutputDir(tmp_path / "out"),
        "file": lambda: TensorFileWriter(tmp_path / "out.safetensors", specs),
        "set": lambda: FileSet(
            tmp_path / "out.safetensors", [tmp_path / f"{i}.safetensors" for i in "ab"], force=False
        ),
    }
    out = makers[kind]()
    assert len(listing(tmp_path)) >= 2
    real = atomic.remove
    sent: list[Path] = []

    def slow(path: Path) -> None:
        if not sent:
            sent.append(path)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(20):  # time for a handler to run in
                time.sleep(0.005)
        real(path)

    monkeypatch.setattr(atomic, "remove", slow)
    with pytest.raises(KeyboardInterrupt), out:
        raise RuntimeError("given up")
    assert sent
    assert listing(tmp_path) == []


def test_an_output_that_nobody_holds_any_more_leaves_nothing(tmp_path: Path) -> None:
    out = OutputDir(tmp_path / "out")
    assert len(listing(tmp_path)) == 2
    del out
    assert listing(tmp_path) == []
