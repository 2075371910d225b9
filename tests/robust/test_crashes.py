"""Whenever a command is killed: nothing partial has a final name, and the next run succeeds."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.robust.conftest import FIXTURES, ROOT, Server, a_batch, contents, leftovers, save

SLOW = pytest.mark.slow
COMMANDS = ("pack", "unpack", "build-mask", "build-d2t", "convert", "map-d2t", "reconstruct")
EACH = pytest.mark.parametrize(
    "command",
    [
        # The others write through the same two ways, a directory and a file.
        each if each in ("pack", "unpack", "reconstruct") else pytest.param(each, marks=SLOW)
        for each in COMMANDS
    ],
)


@dataclass(frozen=True, slots=True)
class Jobs:
    """Two command lines that write different things to one output, for every command."""

    folder: Path
    batch: Path

    def argv(self, command: str, out: Path, other: bool = False) -> list[object]:
        """The command that writes ``out``; ``other`` gives other bytes under the same name."""
        d = self.folder
        heads = ["--head", f"0={FIXTURES}/teacher-a", "--head", f"1={FIXTURES}/teacher-b"]
        size = 60 if other else 100
        lines: dict[str, list[object]] = {
            "pack": [self.batch, "--max-tokens", 2048, "--cp", 1 if other else 2],
            "unpack": [d / ("packs1" if other else "packs")],
            "build-mask": [self.batch, "--pad-multiple", 8 if other else 4],
            "build-d2t": [self.batch, "--draft-vocab-size", size, "--vocab-size", 500],
            "convert": [d / ("other.pt" if other else "one.pt")],
            "map-d2t": [FIXTURES / "teacher_logits.safetensors", "--d2t", self._map(other)],
            "reconstruct": [
                *[FIXTURES / "teacher_hidden.safetensors", *heads, "--tp", 2],
                *["--cp", 1 if other else 2],
            ],
        }
        return [command, *lines[command], "-o", out]

    def _map(self, other: bool) -> Path:
        return self.folder / "half.safetensors" if other else FIXTURES / "draft"

    def output(self, command: str, folder: Path) -> Path:
        """Where the command writes to: a directory, or a file."""
        return folder / ("out" if command in ("pack", "reconstruct") else "out.safetensors")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, run: Server) -> Jobs:
    folder = tmp_path_factory.mktemp("jobs")
    batch = save(folder / "batch.safetensors", a_batch(150, 128))
    for name, geometry in (("packs", ["--cp", 2, "--max-tokens", 2048]), ("packs1", [])):
        # The pack of one is of another batch, so that unpacking gives other bytes.
        made = save(folder / f"of-{name}.safetensors", a_batch(150, 128, seed=len(geometry)))
        assert run("pack", made, "-o", folder / name, *geometry).status == 0
    for name, seed in (("one", 0), ("other", 1)):
        random_state = torch.Generator().manual_seed(seed)
        torch.save(
            {"model": [torch.rand(1000, 200, generator=random_state) for _ in range(3)]},
            folder / f"{name}.pt",
        )
    save(folder / "half.safetensors", {"d2t": torch.arange(4)})
    return Jobs(folder, batch)


@dataclass(slots=True)
class Undisturbed:
    """What a command writes when nobody kills it, and how long it takes."""

    bytes: dict[str, bytes] | bytes
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(
    jobs: Jobs, run: Server, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], Undisturbed]:
    known: dict[tuple[str, bool], Undisturbed] = {}

    def find(command: str, other: bool) -> Undisturbed:
        if (command, other) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            out = jobs.output(command, folder)
            ended = run(*jobs.argv(command, out, other))
            assert ended.status == 0, ended.err
            written = contents(out)
            assert written
            known[command, other] = Undisturbed(written, ended.seconds)
        return known[command, other]

    return find


def moments(count: int, seconds: float) -> Iterator[float]:
    """``count`` moments over the run and a little beyond, one in each equal part of it."""
    at_random = random.Random(count)
    for i in range(count):
        yield 1.1 * seconds * (i + at_random.random()) / count


def kill_at(
    moments_of_death: Iterator[float],
    command: str,
    folder: Path,
    jobs: Jobs,
    run: Server,
    undisturbed: Callable[[str, bool], Undisturbed],
) -> int:
    """Kill a fresh run at each moment; returns how many died of it."""
    right, died = undisturbed(command, False), 0
    out = jobs.output(command, folder)
    for moment in moments_of_death:
        ended = run(*jobs.argv(command, out), after=moment, signal=signal.SIGKILL)
        died += ended.status == -signal.SIGKILL
        found = contents(out)
        assert found in (None, right.bytes), f"partial when killed after {moment} s"
        again = run(*jobs.argv(command, out), *(["--force"] if found else []))
        assert again.status == 0, again.err
        assert contents(out) == right.bytes
        assert leftovers(folder) == []
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    return died


def kill_over(
    moments_of_death: Iterator[float],
    command: str,
    folder: Path,
    jobs: Jobs,
    run: Server,
    undisturbed: Callable[[str, bool], Undisturbed],
) -> tuple[int, int]:
    """Kill runs that replace another whole output; returns how many died, and how many of
    those between the two renames of a directory."""
    died = between = 0
    out = jobs.output(command, folder)
    assert run(*jobs.argv(command, out, True)).status == 0
    for i, moment in enumerate(moments_of_death):
        other = i % 2 == 1
        new, old = undisturbed(command, other), undisturbed(command, not other)
        assert new.bytes != old.bytes
        assert contents(out) == old.bytes
        line = [*jobs.argv(command, out, other), "--force"]
        ended = run(*line, after=moment, signal=signal.SIGKILL)
        died += ended.status == -signal.SIGKILL
        found = contents(out)
        if found is None:  # moved aside, and the new one not yet in: it is whole beside it
            between += 1
            (aside,) = folder.glob(f".{out.name}.old-*")
            assert contents(aside) == old.bytes
        else:
            assert found in (old.bytes, new.bytes), f"partial when killed after {moment} s"
        again = run(*line)
        assert again.status == 0, again.err
        assert contents(out) == new.bytes
        assert leftovers(folder) == []
    return died, between


@EACH
def test_a_killed_run_leaves_nothing_partial_and_the_next_one_succeeds(
    command: str,
    tmp_path: Path,
    jobs: Jobs,
    run: Server,
    undisturbed: Callable[[str, bool], Undisturbed],
) -> None:
    seconds = undisturbed(command, False).seconds
    died = kill_at(moments(2, 0.8 * seconds), command, tmp_path, jobs, run, undisturbed)
    assert died > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "kills"),
    [(each, 50 if each in ("pack", "reconstruct") else 15) for each in COMMANDS],
)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_killed_at_a_hundred_moments_nothing_is_ever_partial(
    command: str,
    kills: int,
    over: bool,
    tmp_path: Path,
    jobs: Jobs,
    run: Server,
    undisturbed: Callable[[str, bool], Undisturbed],
) -> None:
    at = moments(kills, undisturbed(command, False).seconds)
    if over:
        died, between = kill_over(at, command, tmp_path, jobs, run, undisturbed)
        print(f"{command}: {between} of {died} runs died between two renames")
    else:
        died = kill_at(at, command, tmp_path, jobs, run, undisturbed)
        print(f"{command}: {died} of {kills} runs died")
    assert died > kills // 5


@pytest.mark.parametrize("command", ["pack", "unpack", "reconstruct"])
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
@pytest.mark.parametrize(
    "times", [3, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_run_that_is_told_to_end_sweeps_up_behind_itself(
    command: str,
    sent: signal.Signals,
    status: int,
    times: int,
    tmp_path: Path,
    jobs: Jobs,
    run: Server,
    undisturbed: Callable[[str, bool], Undisturbed],
) -> None:
    right = undisturbed(command, False)
    out = jobs.output(command, tmp_path)
    stopped = 0
    for moment in moments(times, 0.8 * right.seconds):
        ended = run(*jobs.argv(command, out), after=moment, signal=sent)
        found = contents(out)
        assert leftovers(tmp_path) == []
        if ended.status == status:
            stopped += 1
            assert found in (None, right.bytes)
            assert ended.err == ("interrupted\n" if sent == signal.SIGINT else "")
        else:
            # Before the command has taken over the signal it dies of it; after it, it is done.
            assert ended.status in (0, -sent), ended.err
            assert found == (right.bytes if ended.status == 0 else None)
        if found:
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    assert stopped > 0


@EACH
def test_a_closed_pipe_ends_a_command_quietly_with_its_output_whole(
    command: str,
    tmp_path: Path,
    jobs: Jobs,
    run: Server,
    undisturbed: Callable[[str, bool], Undisturbed],
) -> None:
    out = jobs.output(command, tmp_path)
    ended = run(*jobs.argv(command, out), stdout="closed")
    assert ended.status in (0, 128 + signal.SIGPIPE)
    assert ended.err == ""
    assert contents(out) == undisturbed(command, False).bytes
    assert leftovers(tmp_path) == []


def test_head_may_close_the_pipe_of_a_real_process(tmp_path: Path, jobs: Jobs) -> None:
    line = f"{sys.executable} -m opdtool pack {jobs.batch} -o {tmp_path}/out --max-tokens 1024"
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} --format jsonl | head -c 1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert piped.returncode in (0, 128 + signal.SIGPIPE)
    assert len(piped.stdout) == 1
    assert piped.stderr == ""
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_real_process_ends_as_its_forks_do(
    sent: signal.Signals, tmp_path: Path, jobs: Jobs, run: Server
) -> None:
    big = save(tmp_path / "big.safetensors", a_batch(3000, 512))
    out = tmp_path / "made" / "out"
    argv = ["pack", big, "-o", out, "--max-tokens", 2048, "--cp", 4]
    line = [sys.executable, "-m", "opdtool", *map(str, argv)]
    for _ in range(5):
        process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        while not list(out.parent.glob(".out.tmp-*/*")):  # it has begun to write
            assert process.poll() is None
        process.send_signal(sent)
        err = process.communicate()[1]
        assert process.returncode == {2: 130, 15: 143, 9: -9}[sent]
        assert "Traceback" not in err
        assert contents(out) is None
        assert sent == signal.SIGKILL or leftovers(out.parent) == []
    assert run(*argv).status == 0
    assert leftovers(out.parent) == []
