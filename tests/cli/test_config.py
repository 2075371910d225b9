"""Defaults from a file and from the environment; flags win over both."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder two levels down, with a.safetensors and b.safetensors, which differ by one."""
    folder = tmp_path / "project" / "work"
    folder.mkdir(parents=True)
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"x": torch.full((2,), value)}, folder / f"{name}.safetensors")
    monkeypatch.chdir(folder)
    return folder


COMPARE = ("compare", "a.safetensors", "b.safetensors")


def test_without_a_file_nothing_is_assumed(cli: Cli, work: Path) -> None:
    assert cli(*COMPARE).status == 1


@pytest.mark.parametrize("name", ["opdtool.toml", "pyproject.toml"])
@pytest.mark.parametrize("up", [0, 1])
@pytest.mark.parametrize("table", ["", "compare"])
def test_defaults_come_from_the_folder_or_one_above_it(
    cli: Cli, work: Path, name: str, up: int, table: str
) -> None:
    prefix = "tool.opdtool" if name == "pyproject.toml" else ""
    head = ".".join(filter(None, [prefix, table]))
    text = f"[{head}]\natol = 3\n" if head else "atol = 3\n"
    ((work, work.parent)[up] / name).write_text(text)
    assert cli(*COMPARE).status == 0
    assert cli("--isolated", *COMPARE).status == 1


def test_the_nearest_file_wins_and_a_pyproject_without_the_table_is_passed_over(
    cli: Cli, work: Path
) -> None:
    (work.parent / "opdtool.toml").write_text("atol = 3\n")
    (work / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert cli(*COMPARE).status == 0
    (work / "pyproject.toml").write_text("[tool.opdtool]\natol = 0.5\n")
    assert cli(*COMPARE).status == 1
    (work / "opdtool.toml").write_text("atol = 1\n")
    assert cli(*COMPARE).status == 0


def test_a_command_s_own_table_wins_over_the_general_keys(cli: Cli, work: Path) -> None:
    (work / "opdtool.toml").write_text("atol = 0.5\n[compare]\natol = 1\n")
    assert cli(*COMPARE).status == 0


def test_config_names_another_file(cli: Cli, work: Path, tmp_path: Path) -> None:
    (work / "opdtool.toml").write_text("atol = 0.5\n")
    (tmp_path / "mine.toml").write_text("atol = 1\n")
    assert cli("--config", tmp_path / "mine.toml", *COMPARE).status == 0
    done = cli("--config", tmp_path / "none.toml", *COMPARE)
    assert done.status == 2
    assert "none.toml" in done.err


def test_flags_win_over_the_environment_which_wins_over_the_file(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def atol() -> float:
        return float(json.loads(cli(*COMPARE, "--format", "json").out)["geometry"]["atol"])

    (work / "opdtool.toml").write_text("atol = 1\n")
    assert atol() == 1
    monkeypatch.setenv("OPDTOOL_ATOL", "2")
    assert atol() == 2
    monkeypatch.setenv("OPDTOOL_COMPARE_ATOL", "3")
    assert atol() == 3
    done = cli(*COMPARE, "--format", "json", "--atol", "4")
    assert json.loads(done.out)["geometry"]["atol"] == 4


def test_the_environment_names_the_file_or_none(
    cli: Cli, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("atol = 1\n")
    monkeypatch.setenv("OPDTOOL_CONFIG", str(tmp_path / "mine.toml"))
    assert cli(*COMPARE).status == 0
    assert cli("--isolated", *COMPARE).status == 1
    monkeypatch.setenv("OPDTOOL_ISOLATED", "1")
    monkeypatch.delenv("OPDTOOL_CONFIG")
    assert cli("--config", tmp_path / "mine.toml", *COMPARE).status == 0


def test_lists_flags_and_paths_are_taken_as_typed_paths_from_the_file(cli: Cli, work: Path) -> None:
    (work.parent / "opdtool.toml").write_text(
        'report = ["r.json", "r.xml"]\nquiet = true\nexit-zero = true\n'
    )
    done = cli(*COMPARE, "--rtol", "0")
    assert done.status == 0
    assert done.out.startswith("fail ")
    assert json.loads((work.parent / "r.json").read_text())["passed"] is False
    assert (work.parent / "r.xml").exists()


def test_a_list_with_commas_between_may_be_a_list_in_the_file(cli: Cli, work: Path) -> None:
    np.save(work / "counts.npy", np.array([5, 9, 0, 7, 1, 0]))
    (work / "opdtool.toml").write_text("[build-d2t]\nmust-include = [2, 4]\n")
    assert cli("build-d2t", "counts.npy", "--draft-vocab-size", "3", "-o", "m").status == 0
    # The most frequent id, and the two that must be in.
    assert (load_file(work / "m")["d2t"] + torch.arange(3)).tolist() == [1, 2, 4]
    (work / "opdtool.toml").write_text("[build-d2t]\nmust-include = '2,4'\n")
    assert cli("build-d2t", "counts.npy", "--draft-vocab-size", "3", "-o", "n").status == 0
    assert (work / "m").read_bytes() == (work / "n").read_bytes()
    (work / "opdtool.toml").write_text("[build-d2t]\nmust-include = [[2]]\n")
    done = cli("build-d2t", "counts.npy", "--draft-vocab-size", "3", "-o", "o")
    assert done.status == 2
    assert "must-include is [[2]]; expected a text, a number or a list of them" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("atoll = 1", "did you mean atol"),
        ("max_memory = '1GiB'", "did you mean max-memory"),
        ("[compare]\natoll = 1", "did you mean atol"),
        ("[pack]\natol = 1", "pack.atol"),
        ("[comprae]\natol = 1", "did you mean compare"),
        ("compare = 1", "[compare]"),
        ("quiet = 'yes'", "true or false"),
        ("[compare]\natol = [1]", "a text or a number"),
        ("[compare]\natol = 'much'", "compare.atol is 'much'; expected a number"),
        ("[pack]\ncp = 2.5", "pack.cp is '2.5'"),
        ("format = 'jsn'", "did you mean json"),
        ("atol =", "is not TOML"),
        ("atol = " + "7" * 5000, "is not TOML: an integer has too many digits\n"),
    ],
)
def test_a_mistake_in_the_file_is_exit_2_and_suggests_the_nearest(
    cli: Cli, work: Path, text: str, said: str
) -> None:
    (work / "opdtool.toml").write_text(text)
    done = cli(*COMPARE)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert cli("--isolated", *COMPARE).status == 1


def test_a_mistake_for_one_command_is_found_by_another(cli: Cli, work: Path) -> None:
    (work / "opdtool.toml").write_text("[pack]\nnonsense = 1\n")
    assert cli(*COMPARE).status == 2


@pytest.mark.parametrize("text", ["atol =", "nonsense = 1", "[compare]\natol = 'much'"])
def test_help_and_explain_work_with_a_broken_file(cli: Cli, work: Path, text: str) -> None:
    (work / "opdtool.toml").write_text(text)
    assert cli(*COMPARE).status == 2
    for argv in (("compare", "--help"), ("compare", "-h"), ("explain",), ("explain", "OPD301")):
        done = cli(*argv)
        assert (done.status, done.err) == (0, "")
        assert done.out
    # Not asking for help with a word that looks like it.
    done = cli(*COMPARE, "--", "-h")
    assert (done.status, done.out) == (2, "")
    done = cli("pack", "a.safetensors", "-o", "-h")
    assert done.status == 2
    assert "opdtool.toml" in done.err
    assert not (work / "-h").exists()


def test_a_working_directory_that_is_gone_is_said(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = cli("inspect", "a.safetensors")
    monkeypatch.chdir(tmp_path)
    assert done.status == 2
    assert "the working directory cannot be read" in done.err


def test_the_normalizers_of_a_file_are_taken_from_the_file(cli: Cli, work: Path) -> None:
    (work.parent / "normalizers.json").write_text('{"loss": "tokens"}')
    (work.parent / "opdtool.toml").write_text('[rescale]\nnormalizers = "normalizers.json"\n')
    (work / "metrics.json").write_text('{"loss": 3.0}')
    done = cli("rescale", "metrics.json", "--token-factor", 2, "--sequence-factor", 1)
    assert done.status == 0, done.err
    assert json.loads(done.out) == {"loss": 6.0}


def test_the_demo_shows_the_same_whatever_the_defaults_are(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cli("demo", "first")
    assert plain.status == 0, plain.err
    (work / "opdtool.toml").write_text("cp = 2\n")
    monkeypatch.setenv("OPDTOOL_EXIT_ZERO", "1")
    monkeypatch.setenv("OPDTOOL_FORMAT", "json")
    other = cli("demo", "second")
    assert other.status == 0, other.err
    assert other.out == plain.out.replace("first;", "second;")
    assert os.environ["OPDTOOL_EXIT_ZERO"] == "1"
