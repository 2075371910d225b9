"""Help, version, completion and progress."""

from __future__ import annotations

import inspect as python_inspect
import io
import os
import re
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from typer.main import get_command

import opdtool
from opdtool.cli.main import app, load
from opdtool.cli.start import COMMANDS
from opdtool.jobs import progress
from tests.cli.conftest import Cli


def test_help_lists_every_command_with_its_line(cli: Cli) -> None:
    done = cli("--help")
    assert done.status == 0
    assert len(COMMANDS) == 18
    assert all(name in done.out for name in COMMANDS)
    assert cli("-h").out == done.out


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_the_quick_answer_is_the_one_that_typer_would_give(cli: Cli, option: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "opdtool", option]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == cli(option).out
    assert "opdtool.cli.start" in done.stderr
    assert not re.search(r"\b(typer|rich|torch)\b", done.stderr)


def test_the_help_names_every_option_of_the_program(cli: Cli) -> None:
    out = cli("--help").out
    options = {text for parameter in get_command(app).params for text in parameter.opts}
    assert {"--version", "--config", "--isolated"} < options
    assert all(text in out for text in options)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_for_itself_and_for_each_option(cli: Cli, name: str) -> None:
    done = cli(name, "--help")
    assert done.status == 0, done.err
    function = import_module(f"opdtool.cli.{name.replace('-', '_')}").command
    assert python_inspect.getdoc(function)
    for parameter in load(name).params:
        if parameter.name != "help":
            assert parameter.help, f"{name} {parameter.name} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_word_of_its_texts(
    cli: Cli, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = " ".join(cli(name, "--help").out.split())
    command = load(name)
    texts = [parameter.help for parameter in command.params]
    texts += (command.help or "").split("\n\n")
    assert len(texts) > 1
    for text in texts:
        assert " ".join(text.split()) in shown


def test_brackets_in_help_are_no_markup(cli: Cli) -> None:
    out = cli("check", "--help").out
    assert all(word in out for word in ("[[step]]", "[defaults]", "[matrix]"))


CHECKING = [
    "verify-pack", "verify-mask", "verify-d2t", "reconstruct", "simulate", "inspect", "compare",
    "check",
]  # fmt: skip


@pytest.mark.parametrize("name", CHECKING)
def test_commands_that_check_take_the_report_options(name: str) -> None:
    options = {text for parameter in load(name).params for text in parameter.opts}
    assert {"--format", "--report", "--exit-zero", "-q"} <= options


def test_no_command_is_exit_2_with_the_help(cli: Cli) -> None:
    done = cli()
    assert done.status == 2
    assert "pack" in done.out


def test_an_unknown_command_suggests_the_nearest(cli: Cli) -> None:
    done = cli("verfy-mask")
    assert (done.status, done.out) == (2, "")
    assert "did you mean verify-mask" in done.err
    assert len(done.err.splitlines()) == 1


def test_version_tells_torch_and_devices_when_verbose(cli: Cli) -> None:
    assert cli("--version").out == f"opdtool {opdtool.__version__}\n"
    for argv in (("--version", "--verbose"), ("--verbose", "--version")):
        rows = cli(*argv).out.splitlines()
        assert rows[0] == f"opdtool {opdtool.__version__}"
        assert rows[1] == f"torch {torch.__version__}"
        assert any(row.startswith("cpu: ") for row in rows)
        assert any(row.startswith("cuda") for row in rows)


def complete(words: str) -> list[str]:
    env = {
        **os.environ,
        "_OPDTOOL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "opdtool"], capture_output=True, text=True, env=env, check=False
    )
    return done.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert set(complete("opdtool verify-")) == {"verify-pack", "verify-mask", "verify-d2t"}
    assert complete("opdtool compare --rt") == ["--rtol"]
    assert set(complete("opdtool pack --tail a")) >= {"absorb"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_shown(shell: str) -> None:
    env = {**os.environ, "_OPDTOOL_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-m", "opdtool"], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0
    assert "_OPDTOOL_COMPLETE=complete_" in done.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_silent_off_a_terminal_and_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.0)
    quiet = io.StringIO()
    monkeypatch.setattr("sys.stderr", quiet)
    with progress.progress("reading", 10) as advance:
        advance(10)
    assert quiet.getvalue() == ""
    loud = Terminal()
    monkeypatch.setattr("sys.stderr", loud)
    monkeypatch.setattr(progress, "AFTER", 60.0)
    with progress.progress("reading", 10) as advance:
        advance(10)
    assert loud.getvalue() == ""


@pytest.mark.parametrize("of_bytes", [False, True])
def test_progress_shows_share_rate_and_time_left_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, of_bytes: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(progress, "AFTER", 0.0)
    loud = Terminal()
    monkeypatch.setattr("sys.stderr", loud)
    with progress.progress("reading", 4 << 20, of_bytes=of_bytes) as advance:
        for _ in range(4):
            advance(1 << 19)
    shown = loud.getvalue()
    assert "reading" in shown
    assert "50%" in shown
    assert ("MiB" in shown) == of_bytes
    assert "-:--:--" in shown or "0:0" in shown
