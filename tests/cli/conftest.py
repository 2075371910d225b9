"""The command line as users type it, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from opdtool.cli import emit as emitting
from opdtool.cli.main import run
from opdtool.findings import Report
from opdtool.report import render, schema

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


@pytest.fixture(autouse=True)
def every_report_satisfies_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its format: each report that a test makes a command emit is valid JSON of the
    published schema."""
    validator = jsonschema.Draft202012Validator(schema())
    original = emitting.emit

    def emit(report: Report, output: emitting.Output, **more: int | None) -> None:
        validator.validate(json.loads(render(report, "json"), parse_constant=pytest.fail))
        original(report, output, **more)

    monkeypatch.setattr(emitting, "emit", emit)


@pytest.fixture
def fixtures() -> Path:
    """The shipped example data."""
    return FIXTURES
