"""--format, --report, --exit-zero and -q, as every checking command has them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

import opdtool
from tests.cli.conftest import Cli


@pytest.fixture
def good(tmp_path: Path) -> tuple[str, ...]:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    return ("compare", str(tmp_path / "a.safetensors"), str(tmp_path / "a.safetensors"))


@pytest.fixture
def bad(tmp_path: Path, good: tuple[str, ...]) -> tuple[str, ...]:
    save_file({"x": torch.zeros(2)}, tmp_path / "b.safetensors")
    return ("compare", good[1], str(tmp_path / "b.safetensors"))


def test_exit_zero_makes_0_of_1_and_of_nothing_else(
    cli: Cli, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert [cli(*argv, "--exit-zero").status for argv in (good, bad)] == [0, 0]
    assert cli(*bad).status == 1
    assert cli("compare", "none", "none", "--exit-zero").status == 2


def test_quiet_prints_nothing_when_all_holds_and_the_failures_otherwise(
    cli: Cli, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert cli(*good, "-q").out == ""
    rows = cli(*bad, "-q").out.splitlines()
    assert [row.split()[0] for row in rows] == ["fail", "FAILED"]
    assert cli(*good, "-q", "--format", "concise").out == ""
    assert cli(*good, "-q", "--format", "github").out == ""
    assert cli(*bad, "-q", "--format", "github").out == cli(*bad, "--format", "github").out


@pytest.mark.parametrize("form", ["json", "jsonl", "junit", "markdown"])
def test_quiet_leaves_what_programs_read_whole(
    cli: Cli, good: tuple[str, ...], bad: tuple[str, ...], form: str
) -> None:
    for argv, status in ((good, 0), (bad, 1)):
        done, whole = cli(*argv, "-q", "--format", form), cli(*argv, "--format", form)
        assert done.status == whole.status == status
        assert len(done.out) > 100
        assert done.out == whole.out


def test_several_reports_are_written_each_by_its_ending(
    cli: Cli, bad: tuple[str, ...], tmp_path: Path
) -> None:
    paths = [
        tmp_path / "new" / f"r{ending}" for ending in (".json", ".xml", ".md", ".html", ".svg")
    ]
    options = [word for path in paths for word in ("--report", str(path))]
    done = cli(*bad, *options)
    assert done.status == 1
    assert json.loads(paths[0].read_text())["passed"] is False
    assert ElementTree.parse(paths[1]).getroot().tag == "testsuites"
    assert paths[2].read_text().startswith("## opdtool compare")
    assert paths[3].read_text().startswith("<!DOCTYPE html>")
    assert ElementTree.parse(paths[4]).getroot().tag.endswith("svg")
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o666 & ~umask}
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(p.name for p in paths)


def test_an_existing_report_is_written_anew(
    cli: Cli, good: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    assert cli(*good, "--report", path).status == 0
    assert json.loads(path.read_text())["passed"] is True


def test_an_unknown_ending_is_refused_before_any_work_and_the_endings_named(
    cli: Cli, tmp_path: Path
) -> None:
    for name in ("r.txt", "r", "r.JSON"):
        done = cli("compare", "none", "none", "--report", tmp_path / name)
        assert (done.status, done.out) == (2, "")
        assert all(end in done.err for end in (".json", ".xml", ".md", ".html", ".svg"))
    (tmp_path / "d.json").mkdir()
    assert "directory" in cli("compare", "none", "none", "--report", tmp_path / "d.json").err


def test_a_report_that_cannot_be_written_is_exit_2(
    cli: Cli, good: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = cli(*good, "--report", tmp_path / "file" / "r.json")
    assert done.status == 2
    assert "r.json" in done.err


def test_an_unknown_format_is_exit_2_and_the_formats_named(cli: Cli, good: tuple[str, ...]) -> None:
    done = cli(*good, "--format", "yaml")
    assert (done.status, done.out) == (2, "")
    assert "jsonl" in done.err


def test_github_adds_to_the_step_summary_where_there_is_one(
    cli: Cli, bad: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert "::error" in cli(*bad, "--format", "github").out
    text = summary.read_text()
    assert text.startswith("before\n")
    assert "## opdtool compare" in text
    assert "FAILED" in text
    cli(*bad, "--format", "json")
    assert summary.read_text() == text
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "summary.md"))
    done = cli(*bad, "--format", "github")
    assert done.status == 1
    assert "GITHUB_STEP_SUMMARY" in done.err


RUN_AND_TELL = f"""
import sys
sys.path[:] = {sys.path!r}
from opdtool.cli import start
start.heed_interrupts = lambda heed=start.heed_interrupts: (heed(), print("here", file=sys.stderr))
sys.argv = ["opdtool", *sys.argv[1:]]
start.main()
"""


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OPD": f"{sys.executable} -m opdtool", **environment}
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env, timeout=120, check=False
    )


def test_a_closed_pipe_ends_quietly_and_costs_no_report(
    bad: tuple[str, ...], tmp_path: Path
) -> None:
    report = tmp_path / "r.json"
    done = shell(f"$OPD {' '.join(bad)} --report {report} | true; echo ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert done.stdout.strip() in ("1", "141")
    assert json.loads(report.read_text())["passed"] is False


@pytest.mark.parametrize(
    "argv",
    [
        "--help",
        "--version",
        "explain",
        "check --help",
        *[pytest.param(words, marks=pytest.mark.slow) for words in ("--version --verbose", "")],
    ],
)
def test_a_full_standard_output_is_exit_2_and_a_closed_one_is_nothing(
    argv: str, bad: tuple[str, ...]
) -> None:
    argv, status = (argv, 0) if argv else (" ".join(bad), 1)
    full = shell(f"$OPD {argv} >/dev/full")
    assert full.returncode == 2
    assert full.stderr == "error: standard output cannot be written: No space left on device\n"
    closed = shell(f"$OPD {argv} >&-")
    assert (closed.returncode, closed.stderr) == (status, "")


def test_no_arguments_on_a_full_disk_is_exit_2_too() -> None:
    full = shell("$OPD >/dev/full")
    assert full.returncode == 2
    assert full.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("argv", ["pack --help", "explain", "--help"])
def test_nobody_reading_on_is_no_failed_check(argv: str) -> None:
    done = shell(f"$OPD {argv} | sleep 0; echo ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


def test_more_than_a_buffer_that_a_command_prints_itself_is_exit_2_on_a_full_disk(
    tmp_path: Path,
) -> None:
    code = (
        "from opdtool.cli import convert, start\n"
        "import sys\n"
        "convert.ForceOption = bool\n"
        "from opdtool.io import convert as io_convert\n"
        "class Written: tensors = (); size = 0\n"
        "io_convert.convert = lambda *a, **k: Written\n"
        "sys.argv = ['opdtool', 'convert', 'a' * 200_000]\n"
        "start.main()\n"
    )
    (tmp_path / "run.py").write_text(code)
    full = shell(f"{sys.executable} {tmp_path}/run.py >/dev/full")
    assert full.returncode == 2
    assert full.stderr == "error: standard output cannot be written: No space left on device\n"


def test_a_full_standard_error_changes_no_status(bad: tuple[str, ...], tmp_path: Path) -> None:
    assert shell("$OPD verfy-mask 2>/dev/full").returncode == 2
    for name, text in (("m", '{"loss": 1.0}'), ("n", "{}")):
        (tmp_path / f"{name}.json").write_text(text)
    factors = "--token-factor 1 --sequence-factor 1"
    rescale = f"$OPD rescale {tmp_path}/m.json --normalizers {tmp_path}/n.json {factors}"
    assert "left as they are: 'loss'" in shell(rescale).stderr
    done = shell(f"{rescale} 2>/dev/full")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"loss": 1.0})
    github = shell(
        f"$OPD {' '.join(bad)} --format github 2>/dev/full", GITHUB_STEP_SUMMARY="/dev/full"
    )
    assert github.returncode == 1


def test_a_path_that_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "ü.pt")
    done = shell(f"$OPD convert {tmp_path}/ü.pt", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xfc.safetensors" in done.stdout


def test_an_encoding_without_the_marks_escapes_them(bad: tuple[str, ...]) -> None:
    done = shell(f"$OPD {' '.join(bad)}", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (1, "")
    assert "\\u2717 OPD953" in done.stdout


def test_ctrl_c_ends_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "n.json").write_text("{}")
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "opdtool", "rescale", "-", "--normalizers", "n.json"]
    command += ["--token-factor", "1", "--sequence-factor", "1", "-o", str(out)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        # More than a pipe holds: once it is written, the command is at work, reading.
        child.stdin.write(b" " * (1 << 20))
        child.stdin.flush()
        child.send_signal(signal.SIGINT)
        printed, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert printed == b""
    assert said.strip() == b"interrupted"
    assert not out.exists()


STUB = "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\n"
CHANGED = f"""
try:
    {STUB.replace(chr(10), "; ", 1).strip()}
    for _ in range(1000): pass
except BaseException:
    raise ImportError("cannot be imported")
"""


@pytest.mark.parametrize("module", ["typer", "torch"])
@pytest.mark.parametrize("text", [STUB, CHANGED])
def test_ctrl_c_in_an_import_is_130(module: str, text: str, tmp_path: Path) -> None:
    # An import that Ctrl-C falls into; libraries also make another exception of it.
    (tmp_path / f"{module}.py").write_text(text)
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    done = shell(f"cd {tmp_path}; $OPD inspect a.safetensors", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


ENDING = """
import os, signal, sys
from opdtool.cli import start

class Late:
    def __del__(self):
        print("late", file=sys.__stderr__, flush=True)
        os.kill(os.getpid(), signal.SIGINT)

start.late = Late()
sys.argv = ["opdtool", "--version"]
start.main()
"""


def test_ctrl_c_while_the_interpreter_takes_itself_down_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "late\n"
    assert (done.returncode, done.stdout) == (0, f"opdtool {opdtool.__version__}\n")


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_the_start_is_130_or_too_late(good: tuple[str, ...]) -> None:
    statuses = []
    for step in range(40):
        with subprocess.Popen(
            # What python itself does until it runs the program is none of its own.
            [sys.executable, "-S", "-c", RUN_AND_TELL, *good],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as child:
            assert child.stderr is not None
            assert child.stderr.readline() == b"here\n"
            time.sleep(0.05 * step)
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=60)
        assert b"Traceback" not in said
        statuses.append(child.returncode)
    assert set(statuses) <= {0, 130}
    assert statuses.count(130) > 5


def terminal(argv: str, columns: int = 80, **environment: str) -> str:
    """What a command prints on a terminal (standard output and error together)."""
    import pty

    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **environment}
    env.pop("NO_COLOR", None) if "NO_COLOR" not in environment else None
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "opdtool", *argv.split()]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=env) as child:
        os.close(slave)
        parts = []
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:
                break
            if not part:
                break
            parts.append(part)
        child.wait()
    os.close(master)
    return b"".join(parts).decode()


def test_a_terminal_gets_colour_and_folding_and_whole_names(tmp_path: Path) -> None:
    name = "model.layers.0." + "long" * 20
    save_file({name: torch.ones(2)}, tmp_path / "a.safetensors")
    argv = f"compare {tmp_path}/a.safetensors {tmp_path}/a.safetensors"
    text = terminal(argv)
    assert "\x1b[" in text
    assert name in text
    plain = terminal(argv, NO_COLOR="1")
    assert "\x1b[" not in plain
    assert name in plain


def test_an_interrupt_that_a_callback_swallows_comes_again() -> None:
    code = (
        "import os, signal, sys, time, weakref\n"
        "from opdtool.cli import start\n"
        "class Thing: pass\n"
        "def body():\n"
        "    start.heed_interrupts()\n"
        "    thing = Thing()\n"
        "    ref = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "    del thing\n"
        "    time.sleep(30)\n"
        "start._main = body\n"
        "start.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
