"""The command line as users type it, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from opdtool.cli.main import run

FIXTURES = Path(__file__).parents[2] / "fixtures"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did."""

    status: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli("pack", path, "-o", out)`` runs one command line; no traceback is ever right for
    the statuses 0, 1 and 2."""
    monkeypatch.setenv("TERM", "dumb")

    def call(*argv: object) -> Outcome:
        capsys.readouterr()
        status = run([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Outcome(status, out, err)

    return call


@pytest.fixture
def fixtures() -> Path:
    """The shipped example data."""
    return FIXTURES
