"""The driver's judgement of what ranks post, with the ranks played by the test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.ranks import driver as driver_module
from opdtool.ranks.board import Board, Greeting, Outcome
from opdtool.ranks.driver import Driver
from opdtool.ranks.errors import RankError
from opdtool.ranks.perform import Task
from opdtool.ranks.stores import Store

TASK = Task(work=print, args=(), tp_size=2, cp_size=2, device="cpu")
FAR = Greeting(host="another machine", pid=1, started="0", own_gpu=False)


@pytest.fixture
def board() -> Board:
    """A board that this process has for itself."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    return Board(cast("Store", store))


@pytest.fixture
def make(board: Board) -> Iterator[Callable[..., Driver]]:
    """Drivers of four ranks that have come, each on a machine far away."""
    made: list[Driver] = []

    def driver(timeout: float = 5.0, deaths: dict[int, str] | None = None) -> Driver:
        found = Driver(
            board, world_size=4, timeout=timeout, deaths=lambda: {} if deaths is None else deaths
        )
        found.sizes = (2, 2)
        made.append(found)
        for rank in range(4):
            board.post(f"hello/{rank}", FAR)
        found.gather()
        assert sorted(found.greetings) == [0, 1, 2, 3]
        return found

    yield driver
    for each in made:
        board.count("bye", 4)
        each.end(0)


def test_a_message_arrives_whole_and_is_taken_down_once(board: Board) -> None:
    assert board.read("long") is None
    message = os.urandom((4 << 20) + 7)
    board.post("long", [message, None])
    assert board.read("long") == [message, None]
    assert board.take("long") == [message, None]
    assert board.read("long") is None
    assert [board.count("n"), board.count("n", 2), board.count("n", 0)] == [1, 3, 3]


def test_a_message_of_a_stranger_is_never_unpickled(board: Board) -> None:
    ours, theirs = (Board(board._store, secret) for secret in (b"ours", b"theirs"))
    theirs.post("task/0", FAR)
    with pytest.raises(RankError, match="task/0 on the ranks' store was not written by this run"):
        ours.read("task/0")
    ours.post("task/0", FAR)
    assert ours.read("task/0") == FAR
    # A message of this run in another's place is a stranger's too.
    for key in ("task/1", "task/1/0"):
        board._store.set(key, board._store.get(key.replace("1", "0", 1)))
    with pytest.raises(RankError, match="task/1 on the ranks' store"):
        ours.read("task/1")


def test_results_come_in_rank_order_and_every_task_has_its_own(
    board: Board, make: Callable[..., Driver]
) -> None:
    driver = make()
    for task in range(2):
        for rank in (3, 1, 0, 2):
            board.post(f"done/{task}/{rank}", Outcome("ok", (task, rank)))
        assert driver.run(TASK) == [(task, rank) for rank in range(4)]
        sent = board.read(f"task/{task}")
        assert (sent.tp_size, sent.device) == (2, "cpu")


@pytest.mark.parametrize(
    ("outcomes", "kind", "message"),
    [
        # What an input error makes of the others' collectives is not the cause.
        (
            {0: ("collective", "lost"), 2: ("input", "too narrow"), 3: ("internal", "odd")},
            InputError,
            r"^rank 2 of 4 \(tp 0, cp 1\): too narrow$",
        ),
        (
            {0: ("collective", "lost"), 1: ("internal", "KeyError: 1"), 2: ("internal", "odd")},
            RankError,
            r"^rank 1 of 4 \(tp 1, cp 0\) failed: KeyError: 1$",
        ),
        # The same refusal on every rank is told once, of the first.
        (
            dict.fromkeys(range(4), ("input", "bad file")),
            InputError,
            r"^rank 0 of 4 \(tp 0, cp 0\): bad file$",
        ),
        # Who waited in vain says so; who did not come is the one to look at.
        (
            {0: ("collective", "all_gather: timed out"), 3: ("ok", 1)},
            RankError,
            r"^rank 1 of 4 .*, rank 2 of 4 .* did not come in time: all_gather: timed out$",
        ),
    ],
)
def test_the_failure_that_explains_the_others_is_the_one_told(
    board: Board,
    make: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    outcomes: dict[int, tuple[Any, Any]],
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.setitem(driver_module._GRACE, "collective", 0.3)
    driver = make()
    for rank, (what, value) in outcomes.items():
        board.post(f"done/0/{rank}", Outcome(what, value))
    with pytest.raises(kind, match=message):
        driver.run(TASK)


def test_a_late_word_of_the_cause_is_waited_for(board: Board, make: Callable[..., Driver]) -> None:
    driver = make()
    board.post("done/0/0", Outcome("collective", "connection closed"))
    late = threading.Timer(0.5, board.post, ("done/0/1", Outcome("input", "no such head")))
    late.start()
    with pytest.raises(InputError, match=r"rank 1 of 4 .*: no such head"):
        driver.run(TASK)
    late.join()


def test_a_rank_far_away_that_no_longer_beats_is_lost_within_the_timeout(
    board: Board, make: Callable[..., Driver]
) -> None:
    driver = make(timeout=1.0)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            for rank in (0, 1, 3):
                board.count(f"beat/{rank}")

    threading.Thread(target=beat, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 4 \(tp 0, cp 1\) has not answered for \d s"):
        driver.run(TASK)
    assert 0.9 < time.monotonic() - started < 4
    stop.set()


def test_a_death_is_the_cause_whatever_the_others_say(
    board: Board, make: Callable[..., Driver]
) -> None:
    deaths: dict[int, str] = {}
    driver = make(deaths=deaths)
    deaths[3] = "was killed by signal 9 (SIGKILL)"
    board.post("done/0/1", Outcome("collective", "connection closed by peer"))
    with pytest.raises(RankError, match=r"^rank 3 of 4 \(tp 1, cp 1\) was killed by signal 9"):
        driver.run(TASK)


def test_the_last_words_of_a_rank_that_ended_are_heard(
    board: Board, make: Callable[..., Driver]
) -> None:
    deaths: dict[int, str] = {}
    driver = make(deaths=deaths)
    deaths[3] = "ended with exit status 2"
    board.post("done/0/3", Outcome("input", "the head is transposed"))
    with pytest.raises(InputError, match=r"rank 3 of 4 .*: the head is transposed"):
        driver.run(TASK)


def test_a_rank_that_never_comes_is_named(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "START_SECONDS", 0.0)
    driver = Driver(board, world_size=2, timeout=0.2, deaths=dict)
    with pytest.raises(RankError, match=r"rank 0 of 2 .* did not start"):
        driver.gather()
    board.count("bye", 2)
    driver.end(3)
    assert board.read("end") == 3


def test_a_process_is_told_from_another_that_has_its_number_now() -> None:
    mine = Greeting.mine(own_gpu=False)
    assert not mine.gone()
    assert not FAR.gone()  # who knows
    reused = Greeting(host=mine.host, pid=mine.pid, started="1", own_gpu=False)
    assert reused.gone()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    child = Greeting(host=mine.host, pid=pid, started="1", own_gpu=False)
    time.sleep(0.2)
    assert child.gone()  # a zombie, not yet waited for
    os.waitpid(pid, 0)
    assert child.gone()
