"""The same work on simulated ranks, in processes of our own, and under torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opdtool.core.errors import InputError
from opdtool.ranks.errors import RankError
from opdtool.ranks.launch import Ranks, open_ranks
from tests.ranks import jobs

ROOT = Path(__file__).parents[2]
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node"]
GRID = [(0, 0, 0, 2, 2, 1), (1, 0, 0, 2, 2, 1), (0, 1, 0, 2, 2, 1), (1, 1, 0, 2, 2, 1)]


def run_job(*argv: str, torchrun: int = 0, timeout: float = 120) -> tuple[int, str, str]:
    """(status, stdout, stderr) of ``tests.ranks.jobs`` in a process of its own."""
    program = [*TORCHRUN, str(torchrun)] if torchrun else [sys.executable]
    done = subprocess.run(
        [*program, "-m", "tests.ranks.jobs", *argv],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def statuses(torchrun_stderr: str) -> set[int]:
    """The exit statuses of the ranks that torchrun reports."""
    return {int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", torchrun_stderr)}


def errors(stderr: str) -> list[str]:
    """opdtool's own lines on stderr."""
    return [line for line in stderr.splitlines() if re.match(r"(internal )?error: ", line)]


@pytest.fixture(scope="module")
def spawned() -> Iterator[Ranks]:
    """Four ranks in four processes, for all tests of this module that leave them alive."""
    with open_ranks("spawn", tp_size=2, cp_size=2, timeout=60, device="cpu") as ranks:
        yield ranks


def test_simulated_and_spawned_ranks_know_the_same_places(spawned: Ranks) -> None:
    with open_ranks("simulated", tp_size=2, cp_size=2, device="cpu") as simulated:
        assert simulated.run(jobs.whereabouts) == GRID
    assert spawned.run(jobs.whereabouts, "word") == GRID
    assert spawned.run(jobs.whereabouts, word="word") == GRID


def test_spawned_ranks_are_processes_with_this_process_s_threads(spawned: Ranks) -> None:
    found = spawned.run(jobs.process_id)
    assert len({pid for pid, _ in found} | {os.getpid()}) == 5
    import torch

    assert {threads for _, threads in found} == {torch.get_num_threads()}


def test_groups_hold_the_ranks_that_differ_in_one_coordinate(spawned: Ranks) -> None:
    expected = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert spawned.run_collective(jobs.neighbours) == expected
    with open_ranks("simulated", tp_size=2, cp_size=2, device="cpu") as simulated:
        assert simulated.run_collective(jobs.neighbours) == expected


def test_messages_above_the_store_s_limit_arrive(spawned: Ranks) -> None:
    items = list(range(2_000_000))
    assert len(items) * 5 > 8 << 20  # pickled, past the 8 MiB that one value may have
    assert spawned.run(jobs.shares, items)[3] == items


def test_work_for_several_ranks_is_one_call_where_they_are_simulated(spawned: Ranks) -> None:
    with open_ranks("simulated", tp_size=2, cp_size=2, device="cpu") as simulated:
        assert simulated.run_together(jobs.shares_with_tp, [1, 2, 3]) == [[1, 2, 3]]
    assert spawned.run_together(jobs.shares_with_tp, [1, 2, 3]) == [[1, 3], [2], [1, 3], [2]]


def test_every_rank_writes_its_own_files(spawned: Ranks, tmp_path: Path) -> None:
    names = spawned.run_writing(tmp_path, jobs.write_own_file, tmp_path)
    assert names == [f"rank{rank}" for rank in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_simulated_rank_that_refuses_is_named() -> None:
    with open_ranks("simulated", tp_size=2, cp_size=2, device="cpu") as ranks:
        with pytest.raises(InputError, match=r"^rank 2 of 4 \(tp 0, cp 1\): the payload is too"):
            ranks.run_collective(jobs.fail_on, 2, "input")
        with pytest.raises(RankError, match=r"^rank 1 of 4 \(tp 1, cp 0\) failed: KeyError"):
            ranks.run_collective(jobs.fail_on, 1, "internal")


def test_a_lone_rank_refuses_without_being_named() -> None:
    with (
        open_ranks("spawn", device="cpu") as ranks,
        pytest.raises(InputError, match=r"^the payload is too narrow"),
    ):
        ranks.run(jobs.fail_on, 0, "input")


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(InputError, match="--timeout"), open_ranks("simulated", timeout=timeout):
        pass


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="cuda:99"), open_ranks("simulated", device="cuda:99"):
        pass


@pytest.mark.parametrize(
    ("job", "status", "message"),
    [
        ("shape-2", 2, r"error: rank [23] of 4 .*: the ranks disagree: .*\[3\], .*\[2\]"),
        pytest.param(
            "input-2",
            2,
            r"error: rank 2 of 4 \(tp 0, cp 1\): the payload is too narrow",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "kill-3",
            3,
            r"error: rank 3 of 4 \(tp 1, cp 1\) was killed by signal 9 \(SIGKILL\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_spawned_rank_that_fails_ends_all_and_is_named(
    job: str, status: int, message: str
) -> None:
    started = time.monotonic()
    found, _, stderr = run_job(job, "spawn", "2", "2", "60")
    assert found == status
    assert len(errors(stderr)) == 1
    assert re.match(message, errors(stderr)[0])
    assert time.monotonic() - started < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "status", "message"),
    [
        ("internal-1", 3, r"internal error: RankError: rank 1 of 4 \(tp 1, cp 0\) failed: KeyE"),
        ("exit-0", 3, r"error: rank 0 of 4 \(tp 0, cp 0\) ended with exit status 0 before"),
        ("stop-1", 3, r"error: rank 1 of 4 \(tp 1, cp 0\) has not answered for \d+ s"),
        ("sleep-2", 3, r"error: rank 2 of 4 \(tp 0, cp 1\) did not come in time: .*all_gather"),
        ("unpicklable-1", 3, r"error: rank 1 of 4 \(tp 1, cp 0\) failed: the result cannot be"),
    ],
)
def test_a_spawned_rank_that_is_stuck_ends_all_within_the_timeout(
    job: str, status: int, message: str
) -> None:
    started = time.monotonic()
    found, _, stderr = run_job(job, "spawn", "2", "2", "8")
    assert found == status
    assert len(errors(stderr)) == 1
    assert re.match(message, errors(stderr)[0])
    assert time.monotonic() - started < 8 + 60  # the timeout, and four starts of torch


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "torchrun"), [(1, 0), (1, 2), (0, 2)])
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
def test_a_rank_that_stands_still_outside_any_collective_is_lost_though_its_process_lives(
    rank: int, torchrun: int
) -> None:
    started = time.monotonic()
    found, _, stderr = run_job(f"alone-{rank}", "spawn", "2", "1", "4", torchrun=torchrun)
    assert found == (1 if torchrun else 3)
    assert len(errors(stderr)) == 1
    message = rf"error: rank {rank} of 2 \(tp {rank}, cp 0\) has not answered for \d+ s"
    assert re.match(message, errors(stderr)[0])
    assert time.monotonic() - started < 4 + 60


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [0, 2])
def test_a_rank_that_works_longer_than_the_timeout_is_waited_for(torchrun: int) -> None:
    status, stdout, stderr = run_job("busy-1", "spawn", "2", "1", "2", torchrun=torchrun)
    assert (status, errors(stderr)) == (0, [])
    assert "[0, 1]" in stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "status", "message"),
    [
        ("input-2", 2, r"error: rank 2 of 4 \(tp 0, cp 1\): the payload is too narrow"),
        ("internal-1", 3, r"internal error: RankError: rank 1 of 4 \(tp 1, cp 0\) failed: KeyE"),
        ("stop-1", 3, r"error: rank 1 of 4 \(tp 1, cp 0\) has not answered for \d+ s"),
        ("sleep-2", 3, r"error: rank 2 of 4 \(tp 0, cp 1\) did not come in time: .*all_gather"),
        ("exit1", 1, ""),
    ],
)
def test_under_torchrun_every_rank_ends_with_the_same_status(
    job: str, status: int, message: str
) -> None:
    found, stdout, stderr = run_job(job, "simulated", "2", "2", "8", torchrun=4)
    assert found == 1  # torchrun's own, for any rank that fails
    assert statuses(stderr) - {-9} == {status}  # a rank that was stopped is killed
    assert len(errors(stderr)) == (1 if message else 0)
    if job == "exit1":
        assert "[([0], [0, 1]), ([1], [0, 1]), ([2], [2, 3]), ([3], [2, 3])]" in stdout
    if message:
        assert re.match(message, errors(stderr)[0])


def test_a_rank_killed_under_torchrun_is_named_and_the_others_agree() -> None:
    found, _, stderr = run_job("kill-3", "simulated", "2", "2", "30", torchrun=4)
    assert found == 1
    assert statuses(stderr) == {3, -9}
    assert errors(stderr) == ["error: rank 3 of 4 (tp 1, cp 1) has died"]


@pytest.mark.slow
def test_the_driving_rank_killed_under_torchrun_is_named_too(tmp_path: Path) -> None:
    found, _, stderr = run_job("kill-0", "simulated", "2", "2", "30", torchrun=4)
    assert found == 1
    assert statuses(stderr) == {3, -9}
    assert len(errors(stderr)) == 1
    assert errors(stderr)[0].startswith("error: rank 0 of 4, which drives the run, has died")


@pytest.mark.slow
def test_torchrun_s_world_beyond_tp_and_cp_is_data_parallel() -> None:
    status, stdout, _ = run_job("whereabouts", "simulated", "1", "2", "60", torchrun=4)
    assert status == 0
    assert "[(0, 0, 0, 1, 2, 2), (0, 1, 0, 1, 2, 2), (0, 0, 1, 1, 2, 2), (0, 1, 1, 1, 2, 2)]" in (
        stdout
    )
    assert stdout.count("driver") == 1


@pytest.mark.slow
def test_a_world_that_tp_and_cp_do_not_divide_is_refused_by_all_ranks() -> None:
    status, _, stderr = run_job("whereabouts", "simulated", "2", "1", "60", torchrun=3)
    assert status == 1
    assert statuses(stderr) == {2}
    assert len(errors(stderr)) == 1
    assert "torchrun started 3 processes, which is no multiple of TP 2 x CP 1 = 2" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [0, 4])
def test_a_backward_pass_in_the_ranks_cannot_turn_success_into_failure(torchrun: int) -> None:
    for _ in range(3):
        status, stdout, _ = run_job("backward", "spawn", "2", "2", "60", torchrun=torchrun)
        assert "[8.0, 8.0, 8.0, 8.0]" in stdout
        assert status == 0


def _wait_for(path: Path, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not path.exists() or not path.read_text():
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    "torchrun",
    [pytest.param(0, id="spawn"), pytest.param(4, id="torchrun", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("victim", [pytest.param("rank", marks=pytest.mark.slow), "driver"])
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
def test_a_killed_process_leaves_no_output_and_no_process(
    torchrun: int, victim: str, tmp_path: Path
) -> None:
    program = [*TORCHRUN, str(torchrun)] if torchrun else [sys.executable]
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*program, "-m", "tests.ranks.jobs", "write", "spawn", "2", "2", "20", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = []
        for rank in range(4):
            note = tmp_path / ".out.part" / "pid" / str(rank)
            _wait_for(note, 60)
            pids.append(int(note.read_text()))
        driver = pids[0] if torchrun else process.pid
        started = time.monotonic()
        os.kill(driver if victim == "driver" else pids[2], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - started < 20
    finally:
        if process.poll() is None:
            process.kill()
    expected = {0: -9 if victim == "driver" else 3, 4: 1}
    assert process.returncode == expected[torchrun]
    limit = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(map(_alive, pids))
    assert list(tmp_path.iterdir()) == []
    lines = errors(stderr)
    assert len(lines) == 1
    if victim == "rank":
        assert lines[0].startswith("error: rank 2 of 4 (tp 0, cp 1) ")
    elif torchrun:
        assert lines[0].startswith("error: rank 0 of 4, which drives the run, has died")
