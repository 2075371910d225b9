"""``opdtool explain``."""

from __future__ import annotations

import pytest

from opdtool.checks.registry import checks, faults
from tests.cli.conftest import Cli
from tests.cli.test_report_options import terminal


def test_the_table_names_every_check_and_every_fault(cli: Cli) -> None:
    done = cli("explain")
    assert (done.status, done.err) == (0, "")
    words = set(done.out.split())
    assert len(checks()) > 5
    assert set(checks()) <= words
    assert {info.name for info in checks().values()} | set(faults()) <= words


@pytest.mark.parametrize("name", ["OPD953", "opd953", "same-values", "Same-Values"])
def test_a_check_is_explained_by_code_or_name_whatever_the_case(cli: Cli, name: str) -> None:
    done = cli("explain", name)
    assert done.status == 0
    info = checks()["OPD953"]
    texts = (info.statement, info.why, info.cause, info.fix)
    assert all(text.rstrip(".") in done.out for text in texts)


def test_every_check_and_fault_has_an_explanation(cli: Cli) -> None:
    for name in (*checks(), *faults()):
        done = cli("explain", name)
        assert done.status == 0
        assert all(word in done.out for word in ("What", "Why it matters", "Usual cause", "Fix"))


def test_an_unknown_name_is_exit_2_with_the_nearest_names(cli: Cli) -> None:
    done = cli("explain", "OPD9533")
    assert (done.status, done.out) == (2, "")
    assert "OPD953" in done.err
    assert len(done.err.splitlines()) == 1
    nothing = cli("explain", "zzzzzz")
    assert nothing.status == 2
    assert "opdtool explain" in nothing.err


def test_on_a_terminal_an_explanation_is_folded_between_words() -> None:
    plain = " ".join(terminal("explain OPD953", columns=1000).split())
    folded = terminal("explain OPD953", columns=60)
    assert " ".join(folded.split()) == plain
    assert max(len(row.rstrip("\r")) for row in folded.split("\n")) <= 60
