"""``opdtool check``: a suite of steps, one report, the worst exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import save_file

from opdtool.cli import check, inspect
from opdtool.report import schema
from tests.cli.conftest import FIXTURES, Cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three files: a and b are equal, c differs from both."""
    made = tmp_path / "suite"
    made.mkdir()
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save_file({"x": torch.full((4,), value)}, made / f"{name}.safetensors")
    return made


def suite(folder: Path, text: str) -> Path:
    path = folder / "suite.toml"
    path.write_text(text)
    return path


def step(*inputs: str, command: str = "compare", more: str = "") -> str:
    names = ", ".join(f'"{name}.safetensors"' for name in inputs)
    return f'[[step]]\ncommand = "{command}"\ninputs = [{names}]\n{more}\n'


def report(cli: Cli, path: Path, status: int) -> dict[str, Any]:
    done = cli("check", path, "--format", "json")
    assert done.status == status, done.err
    whole: dict[str, Any] = json.loads(done.out)
    jsonschema.Draft202012Validator(schema()).validate(whole)
    return whole


def statuses(whole: dict[str, Any]) -> list[int | None]:
    return [step["status"] for step in whole["stats"]["steps"]]


def test_steps_run_in_the_suite_s_folder_and_become_one_report(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = suite(folder, step("a", "b", more='name = "equal"') + step("a", command="inspect"))
    whole = report(cli, path, 0)
    assert whole["command"] == "check"
    assert {entry["step"] for entry in whole["checks"]} == {"equal", "2 inspect"}
    assert {entry["name"] for entry in whole["checks"]} >= {"same-values", "finite-values"}
    assert Path.cwd() == tmp_path


def test_a_failing_step_fails_the_suite_and_ends_it(cli: Cli, folder: Path) -> None:
    whole = report(cli, suite(folder, step("a", "c") + step("a", "b")), 1)
    assert statuses(whole) == [1, None]
    skipped = [entry for entry in whole["checks"] if entry["status"] == "skip"]
    assert [entry["name"] for entry in skipped] == ["step-completed"]


@pytest.mark.parametrize("where", ["top", "step"])
def test_continue_on_failure_runs_what_comes_after(cli: Cli, folder: Path, where: str) -> None:
    key = "continue_on_failure = true\n"
    text = key * (where == "top") + step("a", "c", more=key * (where == "step")) + step("a", "b")
    assert statuses(report(cli, suite(folder, text), 1)) == [1, 0]


def test_a_step_may_say_otherwise_than_the_suite(cli: Cli, folder: Path) -> None:
    more = "continue_on_failure = false"
    text = "continue_on_failure = true\n" + step("a", "c", more=more) + step("a", "b")
    assert statuses(report(cli, suite(folder, text), 1)) == [1, None]


def test_the_worst_exit_status_is_the_suite_s(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = "continue_on_failure = true\n"
    bad = step("a", "c") + step("a", "none")
    whole = report(cli, suite(folder, go_on + bad), 2)
    assert statuses(whole) == [1, 2]
    (entry,) = [entry for entry in whole["checks"] if entry["name"] == "step-completed"]
    assert entry["status"] == "fail"
    assert "none.safetensors" in entry["message"]

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(inspect, "run", broken)
    whole = report(cli, suite(folder, go_on + bad + step("a", command="inspect")), 3)
    assert statuses(whole) == [1, 2, 3]


def test_worst_orders_130_3_2_1_0() -> None:
    assert check.worst([0, 1, 2, 3, 130]) == 130
    assert check.worst([1, 3, 2]) == 3
    assert check.worst([0, 2, 1, None]) == 2
    assert check.worst([0, 1]) == 1
    assert check.worst([0, 0]) == 0
    assert check.worst([0, 143, None]) == 143
    assert check.worst([0, 70]) == 3


def test_an_interrupted_step_ends_the_suite_with_130(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "run", interrupted)
    text = "continue_on_failure = true\n" + step("a", command="inspect") + step("a", "b")
    assert statuses(report(cli, suite(folder, text), 130)) == [130, None]


def test_exit_zero_hides_failures_and_nothing_else(cli: Cli, folder: Path) -> None:
    assert cli("check", suite(folder, step("a", "c")), "--exit-zero").status == 0
    assert cli("check", suite(folder, step("a", "none")), "--exit-zero").status == 2
    more = "exit-zero = true"
    whole = report(cli, suite(folder, step("a", "c", more=more) + step("a", "b")), 0)
    assert statuses(whole) == [0, 0]
    assert whole["passed"] is False


def test_defaults_reach_the_steps_that_have_the_option(cli: Cli, folder: Path) -> None:
    text = "[defaults]\natol = 5\n" + step("a", "c") + step("a", command="inspect")
    assert report(cli, suite(folder, text), 0)["stats"]["steps"][0]["reports"][0]["geometry"] == {
        "tensors": 1, "rtol": 0.0, "atol": 5.0,
    }  # fmt: skip
    text += step("a", "c", more="atol = 0.5")
    assert statuses(report(cli, suite(folder, text), 1)) == [0, 0, 1]


def test_a_matrix_runs_every_combination_of_what_a_step_uses(cli: Cli, folder: Path) -> None:
    text = (
        "continue_on_failure = true\n[matrix]\natol = [0.5, 1]\nwho = ['b', 'c']\n"
        + step("a", "{who}", more='name = "each"')
        + step("a", command="inspect")
    )
    whole = report(cli, suite(folder, text), 1)
    names = [entry["name"] for entry in whole["stats"]["steps"]]
    assert names == [
        "each (atol 0.5, who b)", "each (atol 0.5, who c)",
        "each (atol 1, who b)", "each (atol 1, who c)", "2 inspect",
    ]  # fmt: skip
    assert statuses(whole) == [0, 1, 0, 0, 0]


def test_a_matrix_of_geometries_packs_and_inspects_each(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    text = f"""
[matrix]
cp = [1, 2]
tail = ["absorb", "segment"]
[[step]]
command = "pack"
inputs = ["{fixtures}/batch.safetensors"]
output = "out-{{cp}}-{{tail}}"
tp = 2
sequence-parallel = true
pad-packed-multiple = 64
[[step]]
command = "inspect"
inputs = ["out-{{cp}}-{{tail}}"]
"""
    whole = report(cli, suite(tmp_path, text), 0)
    assert statuses(whole) == [0] * 8
    for cp in (1, 2):
        for tail in ("absorb", "segment"):
            made = json.loads((tmp_path / f"out-{cp}-{tail}/manifest.json").read_text())
            assert (made["geometry"]["cp"], made["geometry"]["tail"]) == (cp, tail)
            assert made["geometry"]["sequence_parallel"] is True
    assert sum(entry["name"] == "manifest-files" for entry in whole["checks"]) == 4


def test_globs_are_expanded_in_order_when_their_step_runs(cli: Cli, folder: Path) -> None:
    (folder / "sub").mkdir()
    save_file({"y": torch.ones(1)}, folder / "sub" / "z.safetensors")
    assert report(cli, suite(folder, step("[ab]")), 0)["passed"]
    whole = report(cli, suite(folder, step("**/z", command="inspect")), 0)
    assert list(whole["stats"]["steps"][0]["reports"][0]["stats"]["files"]) == ["z.safetensors"]


def test_a_glob_that_matches_nothing_is_an_error_and_not_a_pass(cli: Cli, folder: Path) -> None:
    whole = report(cli, suite(folder, step("none*", command="inspect")), 2)
    assert "matches no file" in whole["checks"][0]["message"]
    done = cli("check", folder / "suite.toml", "-q")
    assert done.status == 2
    assert done.err.startswith("error: 1 inspect: ")
    assert done.err.endswith("nothing was checked\n")
    assert "matches no file" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no [[step]]"),
        ("steps = 1", "did you mean step?"),
        ("step = 1", "[[step]]"),
        ("nonsense", "is not TOML"),
        ("defaults = 1\n" + step("a", "b"), "[defaults]"),
        ("continue_on_failure = 1\n" + step("a", "b"), "true or false"),
        ("[defaults]\natoll = 1\n" + step("a", "b"), "did you mean atol"),
        ("[defaults]\nreport = 'x.json'\n" + step("a", "b"), "opdtool check itself"),
        ("[matrix]\natol = 1\n" + step("a", "b"), "list of values"),
        ("[matrix]\natol = []\n" + step("a", "b"), "list of values"),
        ("[matrix]\natoll = [1]\n" + step("a", "b"), "did you mean atol"),
        ("[[step]]\ninputs = []", "command is missing"),
        (step("a", command="comprae"), "did you mean compare"),
        (step("suite", command="check"), "cannot be a step"),
        (step("a", "b", more="attol = 1"), "did you mean atol"),
        (step("a", "b", more="imputs = 1"), "did you mean inputs"),
        (step("a", "b", more="atol = true"), "expected a text or a number"),
        (step("a", "b", more="exit-zero = 'yes'"), "expected true or false"),
        (step("a", "b", more="format = 'json'"), "opdtool check itself"),
        ("[[step]]\ncommand = 'inspect'\ninputs = 'a'", "list of texts"),
        (step("a", "b", more="name = 3"), "name is 3"),
    ],
)
def test_a_suite_that_is_none_is_exit_2_before_anything_runs(
    cli: Cli, folder: Path, text: str, said: str
) -> None:
    done = cli("check", suite(folder, text))
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert "suite.toml" in done.err
    assert len(done.err.splitlines()) <= 2


def test_what_a_step_prints_is_no_part_of_the_report(cli: Cli, folder: Path) -> None:
    (folder / "m.json").write_text('{"kl": 1}')
    (folder / "n.json").write_text('{"kl": "tokens"}')
    text = """
[[step]]
command = "rescale"
inputs = ["m.json"]
normalizers = "n.json"
token-factor = 3
sequence-factor = 1
"""
    done = cli("check", suite(folder, text), "--format", "json")
    assert done.status == 0
    assert json.loads(done.out)["checks"][0]["message"] == "opdtool rescale ran to its end"
    assert '"kl": 3' in done.err


def test_every_format_names_the_step_of_a_failure(cli: Cli, folder: Path) -> None:
    path = suite(folder, step("a", "c", more='name = "my step"'))
    for format in ("full", "concise", "github", "markdown", "junit"):
        assert "my step" in cli("check", path, "--format", format).out
    case = ElementTree.fromstring(cli("check", path, "--format", "junit").out).find(".//failure/..")
    assert case is not None
    assert case.attrib["classname"] == "opdtool.check.my step"


def test_steps_take_the_defaults_that_the_suite_takes(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "opdtool.toml").write_text("[compare]\natol = 9\n")
    (folder / "opdtool.toml").write_text("[compare]\natol = 0.5\n")
    path = suite(folder, step("a", "c"))
    assert cli("check", path).status == 0
    assert cli("--isolated", "check", path).status == 1
    assert os.getcwd() == str(work)


def test_a_suite_that_is_told_to_end_runs_no_further_step(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: object, **__: object) -> None:
        raise SystemExit(143)  # what the handler of SIGTERM does

    monkeypatch.setattr(inspect, "run", told)
    text = "continue_on_failure = true\n" + step("a", command="inspect") + step("a", "b")
    assert statuses(report(cli, suite(folder, text), 143)) == [143, None]


def test_a_step_of_roll_names_its_tensor_and_a_name_takes_the_matrix_s_values(
    cli: Cli, tmp_path: Path
) -> None:
    assert cli("pack", FIXTURES / "batch.safetensors", "-o", tmp_path / "packs").status == 0
    (tmp_path / "suite.toml").write_text(
        """
        [matrix]
        cp = [1, 2]
        [[step]]
        name = "rolled {cp}"
        command = "roll"
        inputs = ["packs/pack-00000.safetensors"]
        tensor = "token_mask"
        output = "rolled-{cp}.safetensors"
        [[step]]
        name = "equal"
        command = "compare"
        inputs = ["rolled-1.safetensors", "rolled-2.safetensors"]
        """
    )
    done = cli("check", tmp_path / "suite.toml", "--format", "json")
    assert done.status == 0, done.err + done.out
    steps = {each["step"] for each in json.loads(done.out)["checks"]}
    assert steps == {"rolled 1", "rolled 2", "equal"}
