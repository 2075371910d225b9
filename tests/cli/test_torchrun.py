"""The same command gives the same bytes on simulated ranks, spawned ones, and under torchrun."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opdtool.cli.main import run

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "4", "-m", "opdtool"]
OPDTOOL = [sys.executable, "-m", "opdtool"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}

PACK = ["pack", str(FIXTURES / "batch.safetensors"), "--max-tokens", "256"]
RECONSTRUCT = [
    "reconstruct", str(FIXTURES / "teacher_hidden.safetensors"),
    "--head", f"0={FIXTURES / 'teacher-a'}", "--head", f"1={FIXTURES / 'teacher-b'}",
]  # fmt: skip
COMMANDS = {"pack": PACK, "reconstruct": RECONSTRUCT}
GRIDS = {"tp2cp2": ["--tp", "2", "--cp", "2"], "tp1cp2dp2": ["--tp", "1", "--cp", "2"]}


def files(directory: Path) -> dict[str, bytes]:
    """Everything in a directory, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def finish(program: list[str], *argv: str, timeout: float = 180) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a command line."""
    done = subprocess.run(
        [*program, *argv],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "grid"),
    [
        pytest.param("pack", "tp2cp2", marks=pytest.mark.slow),
        ("reconstruct", "tp1cp2dp2"),
        pytest.param("pack", "tp1cp2dp2", marks=pytest.mark.slow),
        pytest.param("reconstruct", "tp2cp2", marks=pytest.mark.slow),
    ],
)
def test_outputs_are_the_same_bytes_however_the_ranks_are_run(
    command: str, grid: str, tmp_path: Path
) -> None:
    argv = [*COMMANDS[command], *GRIDS[grid]]
    outs = {how: tmp_path / how for how in ("simulated", "spawn", "torchrun")}
    # Each in a process of its own, so that torch has the same number of threads in all.
    reports = {
        how: finish(
            TORCHRUN if how == "torchrun" else OPDTOOL,
            *argv,
            *(["--ranks", "spawn"] if how == "spawn" else []),
            "-o", str(out), "--format", "json",
        )
        for how, out in outs.items()
    }  # fmt: skip
    for status, _, stderr in reports.values():
        assert status == 0, stderr
    simulated = files(outs["simulated"])
    ranks = 2 if grid == "tp1cp2dp2" else 4
    assert len(simulated) > (ranks if command == "reconstruct" else 4)
    assert any(len(set(data)) > 10 for name, data in simulated.items() if "manifest" not in name)
    assert files(outs["spawn"]) == simulated
    assert files(outs["torchrun"]) == simulated
    # One report, of rank 0 alone, that says the same.
    shown = {how: out.replace(str(outs[how]), "OUT") for how, (_, out, _) in reports.items()}
    assert shown["spawn"] == shown["simulated"]
    assert shown["torchrun"] == shown["simulated"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param([*OPDTOOL, "--ranks", "spawn"], id="spawn"),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_mask_is_judged_the_same_however_the_ranks_are_run(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packs = tmp_path / "packs"
    assert run([*PACK, "--cp", "2", "-o", str(packs), "-q"]) == 0
    assert len(list(packs.glob("pack-*"))) > 4
    argv = ["verify-mask", str(packs), "--batch", str(FIXTURES / "batch.safetensors"),
            "--convention", "unshifted", "--format", "json"]  # fmt: skip
    capsys.readouterr()
    assert run(argv) == 1
    expected = capsys.readouterr().out
    assert '"fault": "mask-shifted"' in expected
    program, more = (how[:3], how[3:]) if how[0] == sys.executable else (how, [])
    status, stdout, stderr = finish(program, *argv, *more)
    assert status == 1, stderr
    assert stdout == expected
    assert "error: " not in stderr


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("memory", [1 << 30, 1 << 20])
def test_replicas_share_out_every_tile_of_a_rank_once(replicas: int, memory: int) -> None:
    from opdtool.io.checkpoints import HeadSpec
    from opdtool.jobs.reconstruct.engine import run_rank
    from opdtool.jobs.reconstruct.files import Files
    from opdtool.jobs.reconstruct.inputs import make_plan
    from opdtool.jobs.reconstruct.job import ReconstructJob

    heads = [HeadSpec(i, FIXTURES / f"teacher-{n}", None) for i, n in enumerate("ab")]
    payload = FIXTURES / "teacher_hidden.safetensors"
    plan = make_plan(ReconstructJob(payload=payload, heads=heads, cp=2, max_memory=memory))
    cpu = torch.device("cpu")

    def made(share: tuple[int, int]) -> tuple[list[int], dict[tuple[int, int], bytes]]:
        pieces: dict[tuple[int, int], bytes] = {}

        def write(slot: int, column: int, logits: torch.Tensor) -> None:
            for row, values in enumerate(logits):
                assert (slot + row, column) not in pieces
                pieces[slot + row, column] = values.float().numpy().tobytes()

        with Files(plan) as files:
            result = run_rank(files, plan, 0, 1, cpu, write=write, share=share)
        return result.slots.tolist(), pieces

    slots, pieces = made((0, 1))
    assert len(slots) > 100
    shares = [made((i, replicas)) for i in range(replicas)]
    assert sorted(slot for share, _ in shares for slot in share) == sorted(slots)
    assert sum(bool(share) for share, _ in shares) == (2 if memory > 1 << 20 else replicas)
    together: dict[tuple[int, int], bytes] = {}
    for _, part in shares:
        assert not together.keys() & part.keys()
        together |= part
    assert together == pieces


def children(parent: int) -> list[int]:
    """The processes that a process has started, the first first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.slow
def test_draft_logits_are_the_same_bytes_under_torchrun(tmp_path: Path) -> None:
    argv = ["map-d2t", str(FIXTURES / "teacher_logits.safetensors"),
            "--d2t", str(FIXTURES / "draft"), "--tp", "2", "-q"]  # fmt: skip
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    assert run([*argv, "-o", str(here)]) == 0
    status, _, stderr = finish(TORCHRUN, *argv, "-o", str(there))
    assert status == 0, stderr
    assert len(here.read_bytes()) > 16 * 96 * 32 * 2
    assert there.read_bytes() == here.read_bytes()
    assert (
        sorted(path.suffix for path in tmp_path.iterdir() if path.name[0] != ".")
        == [".safetensors"] * 2
    )


@pytest.mark.slow
def test_the_equivalence_suite_holds_under_torchrun_with_replicas() -> None:
    argv = ["simulate", "--tp", "2", "--cases", "5", "--format", "json"]
    status, stdout, stderr = finish(TORCHRUN, *argv)
    assert status == 0, stderr
    found = json.loads(stdout)
    assert (found["geometry"]["dp"], found["geometry"]["cases"]) == (2, 5)
    assert found["summary"] == {"passed": 14, "failed": 0, "warned": 0, "skipped": 0}
    assert found["checks"][-1]["total"] > 0


@pytest.mark.slow
def test_the_steps_of_a_suite_run_on_the_ranks_that_torchrun_started(tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(
        """
        [[step]]
        command = "simulate"
        tp = 2
        cases = 1
        [[step]]
        command = "simulate"
        cp = 4
        cases = 1
        """
    )
    status, stdout, stderr = finish(TORCHRUN, "check", str(suite), "--format", "json")
    assert status == 0, stderr
    assert json.loads(stdout)["summary"] == {"passed": 28, "failed": 0, "warned": 0, "skipped": 0}


def processes_under(parent: int) -> list[int]:
    """The spawned ranks of a process: children whose command line is multiprocessing's."""
    found = []
    for pid in children(parent):
        with suppress(OSError):  # it has just ended
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch that takes seconds to pack."""
    path = tmp_path_factory.mktemp("data") / "batch.safetensors"
    random = torch.Generator().manual_seed(0)
    B, S = 4096, 2048
    save_file(
        {
            "input_ids": torch.randint(0, 1000, (B, S), generator=random),
            "input_lengths": torch.randint(1, S + 1, (B,), generator=random),
            "values": torch.rand(B, S, 2, generator=random),
        },
        path,
    )
    return path


def moments() -> list[object]:
    """When a rank is killed: while ranks start, or while they work."""
    return [
        pytest.param(phase, number, marks=[pytest.mark.slow])
        for phase in ("starting", "working")
        for number in range(4)
    ]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
@pytest.mark.parametrize(("phase", "number"), moments())
def test_a_rank_killed_at_a_random_moment_ends_the_run_with_clean_output(
    phase: str, number: int, batch: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*OPDTOOL, "pack", str(batch), "--max-tokens", "8192", "--tp", "2", "--cp", "2",
         "--ranks", "spawn", "--timeout", "30", "-o", str(tmp_path / "out")],
        cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    limit = time.monotonic() + 60

    def reached() -> bool:
        if phase == "starting":
            return len(processes_under(process.pid)) == 4
        return any(tmp_path.glob(".out.tmp-*/*"))

    while not reached():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1.2 if phase == "starting" else 0.3))
    ranks = processes_under(process.pid)
    rank = random.randrange(4)
    assert len(ranks) == 4
    os.kill(ranks[rank], signal.SIGKILL)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - started < 30
    assert process.returncode == 3
    assert re.fullmatch(
        r"error: rank [0-3] of 4 \(tp [01], cp [01]\) was killed by signal 9 \(SIGKILL\)\n", stderr
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_its_ranks_and_leaves_nothing(
    sent: signal.Signals, status: int, batch: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*OPDTOOL, "pack", str(batch), "--max-tokens", "8192", "--tp", "2", "--cp", "2",
         "--ranks", "spawn", "-o", str(tmp_path / "out")],
        cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    limit = time.monotonic() + 90
    while not any(tmp_path.glob(".out.tmp-*/*")):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    ranks = processes_under(process.pid)
    assert len(ranks) == 4
    if sent == signal.SIGINT:  # a terminal sends it to all of them
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert stderr == ("interrupted\n" if sent == signal.SIGINT else "")
    assert list(tmp_path.iterdir()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_killed_under_torchrun_ends_the_run_with_clean_output(
    rank: int, batch: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*TORCHRUN, "pack", str(batch), "--max-tokens", "8192", "--tp", "2", "--cp", "2",
         "-o", str(tmp_path / "out")],
        cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    limit = time.monotonic() + 90
    while not any(tmp_path.glob(".out.tmp-*/*")):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    time.sleep(random.uniform(0, 0.3))
    ranks = {
        int(line.split(b"=")[1]): pid
        for pid in children(process.pid)
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if line.startswith(b"RANK=")
    }
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[rank], signal.SIGKILL)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - started < 30
    assert process.returncode == 1  # torchrun's own
    assert {int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", stderr)} == {3, -9}
    said = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert re.match(rf"error: rank {rank} of 4.* has died", said[0])
    # A run that was killed leaves its lock, hidden and empty; the next run takes it.
    assert {path.name for path in tmp_path.iterdir()} <= {".out.lock"}


@pytest.mark.slow
def test_an_input_that_a_rank_refuses_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    batch = load_file(FIXTURES / "batch.safetensors")
    batch["token_mask"][3, 5] = float("nan")
    path = tmp_path / "bad.safetensors"
    save_file(batch, path)
    status, stdout, stderr = finish(
        TORCHRUN, "pack", str(path), "--cp", "2", "-o", str(tmp_path / "out")
    )
    assert status == 1  # torchrun's own
    assert {int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", stderr)} == {2}
    said = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert re.match(r"error: rank [0-3] of 4 \(tp 0, cp [01], dp [01]\): .*row 3", said[0])
    assert stdout == ""
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad.safetensors"]


def test_a_single_rank_is_run_in_this_process(tmp_path: Path) -> None:
    children = processes_under(os.getpid())
    assert run([*PACK, "-o", str(tmp_path / "out"), "--ranks", "spawn", "-q"]) == 0
    assert processes_under(os.getpid()) == children
    assert (tmp_path / "out" / "manifest.json").exists()
