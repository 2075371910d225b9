"""Runs of one process a rank: whichever process is killed, all end soon and nothing is left."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.robust.conftest import FIXTURES, ROOT, Server, a_batch, contents, leftovers, save

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/stat").exists(), reason="processes are read from /proc"
    ),
]
KILLS = int(os.environ.get("OPDTOOL_KILLS", "1"))
"""How often each command's run is killed in each way."""
SOON = 30
"""Seconds in which everything has ended; a rank that is missed is not waited for longer."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """Command lines on four ranks, or two, with enough to do to be killed at it."""

    batch: Path
    mask: Path
    packs: Path
    logits: Path
    d2t: Path

    def argv(self, command: str, out: Path) -> list[object]:
        """The command, writing to ``out`` where it writes."""
        lines: dict[str, list[object]] = {
            "pack": [self.batch, "-o", out, "--cp", 2, "--tp", 2, "--max-tokens", 4096],
            "map-d2t": [self.logits, "--d2t", self.d2t, "-o", out, "--tp", 2],
            "verify-mask": [self.packs, "--batch", self.batch],
            "verify-pack": [self.packs, "--batch", self.batch],
            "simulate": ["--tp", 2, "--cp", 2, "--cases", 60],
            "reconstruct": [
                *[FIXTURES / "teacher_hidden.safetensors", "-o", out, "--tp", 2, "--cp", 2],
                *["--head", f"0={FIXTURES}/teacher-a", "--head", f"1={FIXTURES}/teacher-b"],
            ],
        }
        return [command, *lines[command], "--ranks", "spawn", "--timeout", SOON]


COMMANDS = ("pack", "map-d2t", "verify-mask", "verify-pack", "simulate", "reconstruct")
WRITES = {"pack": "out", "map-d2t": "out.safetensors", "reconstruct": "out"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, run: Server) -> Jobs:
    folder = tmp_path_factory.mktemp("spawned")
    batch = save(folder / "batch.safetensors", a_batch(3000, 512))
    packs = folder / "packs"
    assert run("pack", batch, "-o", packs, "--cp", 2, "--max-tokens", 4096).status == 0
    logits = save(folder / "logits.safetensors", {"teacher_full_logits": torch.rand(4, 128, 32768)})
    d2t = save(folder / "half.safetensors", {"d2t": torch.arange(16384)})
    return Jobs(batch, folder / "mask.safetensors", packs, logits, d2t)


def alive(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def ranks_of(driver: int) -> list[int]:
    """The ranks' processes, as far as they have been started."""
    found = []
    for pid in alive(driver):
        try:
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def wait_for(what: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not what() and time.monotonic() < limit:
        time.sleep(0.02)
    return what()


def killed(
    argv: list[object], victim: str, sent: signal.Signals, after: float
) -> tuple[int, str, bool]:
    """Start a run, send a signal so long after its ranks have appeared; its status, what it
    said, and whether the signal came before its end. All its processes are gone then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "opdtool", *map(str, argv)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    count = 2 if argv[0] == "map-d2t" or str(argv[0]).startswith("verify") else 4
    try:
        assert wait_for(lambda: len(ranks_of(process.pid)) == count, 60)
        ranks = ranks_of(process.pid)
        time.sleep(after)
        running = process.poll() is None
        target = ranks[len(ranks) // 2] if victim == "rank" else process.pid
        try:
            os.kill(target, sent)
        except ProcessLookupError:
            running = False
        _, err = process.communicate(timeout=2 * SOON)
        assert wait_for(lambda: not alive(process.pid), SOON), alive(process.pid)
    finally:
        if alive(process.pid) or process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, err, running


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("victim", "sent"),
    [("rank", signal.SIGKILL), ("driver", signal.SIGKILL), ("driver", signal.SIGTERM)],
    ids=["rank", "driver", "driver-SIGTERM"],
)
def test_a_killed_process_ends_the_run_soon_and_leaves_nothing(
    command: str, victim: str, sent: signal.Signals, tmp_path: Path, jobs: Jobs, run: Server
) -> None:
    out = tmp_path / WRITES.get(command, "none")
    argv = jobs.argv(command, out)
    moments, died = random.Random(command + victim), 0
    for _ in range(KILLS):
        status, err, running = killed(argv, victim, sent, moments.uniform(0, 2.5))
        lines = err.splitlines()
        assert "Traceback" not in err
        if victim == "rank" and status != 0:
            died += 1
            assert running
            assert status == 3, err
            assert len(lines) == 1, err
            assert re.match(r"error: rank \d of \d ", lines[0]), err
        elif status != 0:
            died += 1
            # Before the command has taken the signal over it dies of it.
            assert status in ({-9} if sent == signal.SIGKILL else {143, -15}), err
        # What a killed driver cannot sweep up, its ranks or the next run do.
        if status == 0:
            assert contents(out) or command not in WRITES
        else:
            assert contents(out) is None
        if command in WRITES and victim == "driver":
            again = run(*argv[:-4], *(["--force"] if status == 0 else []))
            assert again.status == 0, again.err
            assert contents(out)
        assert leftovers(tmp_path) == []
        if out.exists():
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    print(f"{command}: {died} of {KILLS} runs died of a killed {victim}")
    assert died > 0 or KILLS == 1
