"""The figures of the benchmarks are worked out from what was measured; nothing is timed here."""

from __future__ import annotations

import json
import sys
import time

import pytest

from benchmarks import commands, harness
from benchmarks.commands import Case, rows_of
from benchmarks.harness import Row, Run, amount, as_json, best_each, exponents

MIB = 1 << 20


def finished(wall: float, peak: int = 0, output: str = "") -> Run:
    return Run(returncode=0, wall=wall, cpu=wall, peak_rss=peak, output=output)


BARE = finished(2.0, 200 * MIB)
PASSING = Case("roll", ("roll",), "pass")
FAILING = Case("roll, wrong", ("roll",), "", status=1, beside="roll")


def test_a_command_is_measured_beyond_the_start_and_beside_four_quarters_of_itself() -> None:
    quarter = {"roll": (finished(3.0), finished(2.5))}
    whole = {"roll": (finished(6.0, 230 * MIB), finished(4.0, 260 * MIB))}
    time, growth, memory = rows_of(PASSING, 8, quarter, whole, BARE)
    assert (time.ours, time.plain, time.ratio) == (4.0, 2.0, 2.0)
    assert (growth.ours, growth.plain, growth.ratio) == (4.0, 4.0, 1.0)
    assert growth.reached
    assert (memory.ours, memory.plain, memory.ratio) == (30 * MIB, 60 * MIB, 0.5)


def test_growth_past_a_fifth_more_than_the_data_is_not_reached() -> None:
    quarter = {"roll": (finished(3.0), finished(2.5))}
    for wall, reached in ((6.79, True), (6.81, False)):
        whole = {"roll": (finished(wall), finished(4.0))}
        assert rows_of(PASSING, 8, quarter, whole, BARE)[1].reached is reached


def test_growth_from_next_to_nothing_is_not_judged() -> None:
    quarter = {"roll": (finished(2.04), finished(2.04))}
    whole = {"roll": (finished(9.0), finished(4.0))}
    growth = rows_of(PASSING, 8, quarter, whole, BARE)[1]
    assert growth.reached is None
    assert growth.goal == ""


def test_a_failing_check_stands_beside_the_passing_one() -> None:
    for wall, reached in ((6.0, True), (6.1, False)):
        whole = {"roll": (finished(4.0), finished(9.0)), "roll, wrong": (finished(wall), None)}
        (row,) = rows_of(FAILING, 8, whole, whole, BARE)
        assert (row.plain, row.reached) == (2.0, reached)
        assert row.ratio == pytest.approx((wall - 2) / 2)


def test_the_fastest_run_counts_with_the_greatest_memory() -> None:
    found = commands.least([finished(3.0, 5), finished(2.0, 4, "fast"), finished(4.0, 9)])
    assert (found.wall, found.peak_rss, found.output) == (2.0, 9, "fast")


def test_every_failing_case_stands_behind_the_passing_one_it_is_measured_against() -> None:
    seen = set()
    for case in commands.cases():
        assert (case.status == 1) == (not case.plain) == bool(case.beside)
        assert not case.beside or case.beside in seen
        seen.add(case.name)


def test_the_exponent_is_that_from_the_least_work_to_the_greatest() -> None:
    def row(name: str, work: float | None, ours: float) -> Row:
        return Row(name=name, size="", ours=ours, plain=None, ratio=None, work=work)

    rows = [row("a", 40, 16.0), row("a", 10, 1.0), row("a", 20, 9.0), row("b", 10, 1.0)]
    assert exponents([*rows, row("c", None, 1.0)]) == {"a": pytest.approx(2.0)}
    listed = json.loads(as_json(rows))["rows"]
    assert [one["exponent"] for one in listed] == [pytest.approx(2.0)] * 3 + [None]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.5 s"),
        (0.0123, "s", "12.3 ms"),
        (4.5e-5, "s", "45 us"),
        (3 * MIB, "B", "3.0 MiB"),
        (192018.0, "bins", "192,018 bins"),
    ],
)
def test_an_amount_has_its_unit(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_calls_take_turns_and_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    order: list[str] = []
    waits = {"a": iter([9.0, 5.0, 3.0]), "b": iter([9.0, 1.0, 2.0])}
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(name: str) -> None:
        order.append(name)
        now[0] += next(waits[name])

    found = best_each([lambda: call("a"), lambda: call("b")], repeats=2, warmup=1)
    assert found == [3.0, 1.0]
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_a_child_is_run_to_its_end_and_its_memory_is_its_own() -> None:
    script = "import sys; x = bytearray(64 << 20); print('out'); sys.exit(3)"
    done = harness.run([sys.executable, "-S", "-c", script])
    small = harness.run([sys.executable, "-S", "-c", "pass"])
    assert (done.returncode, done.output) == (3, "out\n")
    assert small.returncode == 0
    assert done.peak_rss - small.peak_rss > 60 * MIB


@pytest.mark.slow
def test_every_command_runs_beside_its_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "REPEATS", 1)
    monkeypatch.setattr(commands, "ROWS", {"small": 16})
    rows = commands.rows("small")
    cases = commands.cases()
    assert len(rows) == sum(1 if case.status else 3 for case in cases)
    assert {row.name for row in rows} >= {case.name for case in cases}
    assert all(row.ours > 0 and row.ratio is not None for row in rows)
