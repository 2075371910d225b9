"""Options whose words or numbers nobody can have meant, for every command that takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from opdtool.cli.main import load
from opdtool.cli.start import COMMANDS
from tests.cli.conftest import FIXTURES, Cli

HUGE = 99_999_999_999_999_999_999
"""Past int64."""
BATCH = FIXTURES / "batch.safetensors"


def takers(option: str) -> list[str]:
    """The commands that have an option."""
    return [name for name in COMMANDS if any(option in p.opts for p in load(name).params)]


def line(command: str, tmp_path: Path) -> list[object]:
    """A command line that works, written by hand; what it writes goes to ``tmp_path``."""
    heads = ["--head", f"0={FIXTURES / 'teacher-a'}", "--head", f"1={FIXTURES / 'teacher-b'}"]
    sizes = ["--draft-vocab-size", 8, "--vocab-size", 320]
    factors = ["--token-factor", 1, "--sequence-factor", 1]
    one_pack = tmp_path / "packs" / "pack-00000.safetensors"
    logits = FIXTURES / "teacher_logits.safetensors"
    lines: dict[str, list[object]] = {
        "pack": [BATCH, "-o", tmp_path / "packs"],
        "verify-pack": [tmp_path / "packs", "--batch", BATCH],
        "unpack": [tmp_path / "packs", "-o", tmp_path / "batch.safetensors"],
        "build-mask": [BATCH, "-o", tmp_path / "mask.safetensors"],
        "verify-mask": [tmp_path / "packs", "--batch", BATCH],
        "roll": [one_pack, "--name", "input_ids", "-o", tmp_path / "rolled.safetensors"],
        "compare": [BATCH, BATCH],
        "inspect": [BATCH],
        "simulate": [BATCH],
        "build-d2t": [BATCH, *sizes, "-o", tmp_path / "d2t.safetensors"],
        "verify-d2t": [FIXTURES / "draft"],
        "rescale": [
            FIXTURES / "metrics.json",
            "--normalizers",
            FIXTURES / "normalizers.json",
            *factors,
        ],
        "map-d2t": [logits, "--d2t", FIXTURES / "draft", "-o", tmp_path / "drafted.safetensors"],
        "reconstruct": [FIXTURES / "teacher_hidden.safetensors", *heads],
    }
    return lines[command]


@pytest.mark.parametrize("word", ["tpu", "", "-1", "cuda:x", "cuda:99999", "CPU"])
@pytest.mark.parametrize("command", takers("--device"))
def test_a_device_that_is_none_is_refused_by_every_command(
    cli: Cli, tmp_path: Path, command: str, word: str
) -> None:
    assert cli("pack", BATCH, "-o", tmp_path / "packs").status == 0
    done = cli(command, *line(command, tmp_path), "--device", word)
    assert done.status == 2, done.err
    assert done.err == f"error: --device {word!r} is none; write auto, cpu, cuda or cuda:N\n"


@pytest.mark.parametrize("command", takers("--device"))
def test_the_command_lines_here_are_right_but_for_the_option(
    cli: Cli, tmp_path: Path, command: str
) -> None:
    assert cli("pack", BATCH, "-o", tmp_path / "packs").status == 0
    force = ["--force"] if command == "pack" else []
    done = cli(command, *line(command, tmp_path), *force, "--device", "cpu")
    assert done.status == 0, done.out + done.err


@pytest.mark.parametrize(
    ("command", "option", "number", "says"),
    [
        # 2 CP slots a sequence would still be counted by int32; so many ranks are nobody's.
        *[(name, "--cp", 1_000_000_000, "ranks") for name in takers("--cp")],
        *[(name, "--cp", HUGE, "ranks") for name in takers("--cp")],
        *[(name, "--tp", HUGE, "ranks") for name in ("pack", "build-mask", "simulate", "map-d2t")],
        ("pack", "--pad-multiple", HUGE, "int32"),
        ("pack", "--pad-packed-multiple", HUGE, "int32"),
        ("pack", "--pad-packed-to", HUGE, "int32"),
        ("build-mask", "--pad-multiple", 2**31, "int32"),
        ("verify-mask", "--pad-packed-multiple", 2**62, "contradicts the manifest"),
        ("reconstruct", "--student-seq-len", HUGE, "int32"),
        ("verify-mask", "--shift", HUGE, "past the row width 96"),
        ("verify-mask", "--shift", 97, "past the row width 96"),
        ("verify-d2t", "--tp", HUGE, "ranks"),
        *[
            ("verify-d2t", option, number, "more than token ids can count")
            for option in (
                "--vocab-size",
                "--draft-vocab-size",
                "--tokenizer-vocab-size",
                "--pad-vocab-to-multiple-of",
            )
            for number in (HUGE, 10**13, 2**31 + 1)
        ],
        ("build-d2t", "--vocab-size", HUGE, "more than token ids can count"),
        ("build-d2t", "--vocab-size", 2**31, "of counts, past --max-memory"),
        ("reconstruct", "--pad-vocab-to-multiple-of", HUGE, "token ids"),
    ],
)
def test_a_size_that_nobody_has_is_refused_at_once(
    cli: Cli, tmp_path: Path, command: str, option: str, number: int, says: str
) -> None:
    if command in ("verify-pack", "verify-mask"):
        assert cli("pack", BATCH, "-o", tmp_path / "packs").status == 0
        if option == "--cp":
            says = "--cp"  # the files say otherwise
    done = cli(command, *line(command, tmp_path), option, number)
    assert done.status == 2, done.err
    assert says in done.err
    assert 1 <= len(done.err.splitlines()) <= 2


def test_a_manifest_that_records_such_sizes_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("pack", BATCH, "-o", tmp_path / "packs").status == 0
    manifest = tmp_path / "packs" / "manifest.json"
    text = manifest.read_text()
    assert text.count('"tp": 1') == 1
    manifest.write_text(text.replace('"tp": 1', f'"tp": {HUGE}'))
    for command in ("verify-pack", "verify-mask"):
        done = cli(command, *line(command, tmp_path))
        assert done.status == 2
        assert "ranks" in done.err


@pytest.mark.parametrize("size", ["9" * 5000 + "GiB", "9" * 400 + "GiB", "9" * 20, "8388608TiB"])
def test_more_memory_than_anybody_has_is_no_size(cli: Cli, tmp_path: Path, size: str) -> None:
    done = cli("pack", BATCH, "-o", tmp_path / "packs", "--max-memory", size)
    assert done.status == 2
    assert "is no size; write 512MiB, 2GiB or a number of bytes" in done.err
    assert len(done.err) < 200


@pytest.mark.parametrize("command", ["verify-mask", "verify-pack"])
@pytest.mark.parametrize("tag", ["cp0of" + "9" * 100, "cp" + "0" * 100 + "of2", "cp7of99999999"])
def test_a_name_that_speaks_of_more_ranks_than_there_can_be_is_refused(
    cli: Cli, tmp_path: Path, command: str, tag: str
) -> None:
    path = tmp_path / f"pack-00000.{tag}.safetensors"
    path.write_bytes(b"")
    done = cli(command, path, "--batch", BATCH)
    assert done.status == 2
    assert "nobody has as many ranks as its name says" in done.err


def test_of_many_missing_ranks_the_first_is_named_at_once(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "pack-00000.cp0of9999999.safetensors"
    path.write_bytes(b"")
    done = cli("verify-mask", path, "--batch", BATCH)
    assert done.status == 2
    assert "1 of 9999999 context-parallel files; the file of rank 1 " in done.err


def test_a_large_vocabulary_is_judged_without_a_table_of_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    zeros = torch.zeros

    def counted(*size: Any, **more: Any) -> torch.Tensor:
        made.append(max([0, *(n for n in size if isinstance(n, int))]))
        return zeros(*size, **more)

    monkeypatch.setattr(torch, "zeros", counted)
    done = cli(*("verify-d2t", FIXTURES / "draft", "--vocab-size", 2**31, "--format", "json"))
    assert done.status == 1, done.err
    assert {each["name"] for each in json.loads(done.out)["checks"] if each["status"] == "fail"}
    assert max(made, default=0) < 1 << 20


class _RefusedError(Exception):
    """What the stand-in for a context raises."""


class _Context:
    """As much of a context as an option asks for its value."""

    def fail(self, message: str) -> None:
        raise _RefusedError(message)


def test_an_empty_path_is_refused_wherever_a_path_is_taken() -> None:
    tried = []
    for command in COMMANDS:
        for parameter in load(command).params:
            if "Path" not in str(parameter.type_descriptor.annotation):
                continue
            tried.append((command, parameter.name))
            for given in ("", ["x", ""]):
                with pytest.raises(_RefusedError, match="an empty path"):
                    parameter.consume_value(_Context(), {parameter.name: given})
            assert parameter.consume_value(_Context(), {parameter.name: "x"})[0] == "x"
    assert len(tried) >= 50


@pytest.mark.parametrize("option", ["--batch", "--report"])
def test_an_empty_path_is_said_to_be_one(cli: Cli, tmp_path: Path, option: str) -> None:
    assert cli("pack", BATCH, "-o", tmp_path / "packs").status == 0
    done = cli(*["verify-mask", *line("verify-mask", tmp_path), option, ""])
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: an empty path; if it comes from a variable")


def test_a_name_that_a_runner_would_obey_is_printed_as_text(cli: Cli, tmp_path: Path) -> None:
    name = "::error file=x::pwned ##[command]y"
    save_file({name: torch.zeros(2), "lm": torch.ones(2)}, tmp_path / "evil.safetensors")
    for form in ("full", "concise", "markdown"):
        out = cli("inspect", tmp_path / "evil.safetensors", "--format", form).out
        assert "pwned" in out or form == "concise"
        assert not [row for row in out.splitlines() if row.strip().startswith("::")]
        assert "##[" not in out
    odd = tmp_path / "a\n::error::b\x1b[31m##[warning]c.safetensors"
    done = cli("inspect", odd)
    assert done.status == 2
    assert not [row for row in done.err.splitlines() if row.strip().startswith("::")]
    assert "##[" not in done.err
    assert "\x1b" not in done.err


@pytest.mark.parametrize("ending", [".pt", ".NPY", ".bin"])
@pytest.mark.parametrize(
    "command", [name for name in takers("-o") if name not in ("pack", "reconstruct", "convert")]
)
def test_an_output_is_not_given_the_name_of_another_format(
    cli: Cli, tmp_path: Path, command: str, ending: str
) -> None:
    assert cli("pack", BATCH, "-o", tmp_path / "packs").status == 0
    before = sorted(tmp_path.iterdir())
    words = line(command, tmp_path)
    if "-o" in words:
        words = words[: words.index("-o")]
    done = cli(command, *words, "-o", tmp_path / f"out{ending}")
    assert (done.status, done.out) == (2, "")
    assert "name it" in done.err
    assert ".safetensors" in done.err
    assert sorted(tmp_path.iterdir()) == before
