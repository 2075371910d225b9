"""The pages say what the tool does: generated ones are current, shown commands are run."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate
from opdtool.checks.registry import checks, faults
from opdtool.cli.demo import STEPS
from opdtool.cli.start import COMMANDS
from tests.cli.conftest import Cli

PAGES = generate.written_pages()
MEASURED = re.compile(r"greatest|least|worst|mean|up to 1e|top-1")
"""Rows whose every figure may differ: where the greatest of many rounding errors is."""
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+")


def same_but_for_rounding(shown: str, made: str) -> bool:
    """Equal texts, but for spaces and for the last digits of measured numbers: products come
    out a little different on another processor."""

    def parts(text: str) -> tuple[list[str], list[float]]:
        rows = (re.sub(r"\d", "", row) if MEASURED.search(row) else row for row in text.split("\n"))
        text = "\n".join(rows)
        words = NUMBER.sub("#", text).split()
        return [word.strip("█▏▎▍▌▋▊▉") for word in words], [*map(float, NUMBER.findall(text))]

    (words, numbers), (other_words, other_numbers) = parts(shown), parts(made)
    return [*filter(None, words)] == [*filter(None, other_words)] and all(
        math.isclose(a, b, rel_tol=0.1, abs_tol=1e-4)
        for a, b in zip(numbers, other_numbers, strict=True)
    )


def test_the_comparison_of_outputs_sees_a_word_and_a_number_that_differ() -> None:
    assert same_but_for_rounding("a 1.00 of 12", "a  1.001 of 12")
    assert not same_but_for_rounding("a 1.00 of 12", "a 1.00 of 13")
    assert not same_but_for_rounding("a 1.00 of 12", "a 1.50 of 12")
    assert not same_but_for_rounding("failed 1.0", "passed 1.0")


def test_the_generated_pages_are_current() -> None:
    for name, made in (("checks", generate.checks_page()), ("commands", generate.commands_page())):
        assert (generate.DOCS / f"{name}.md").read_text() == made, "run `make docs`"


def test_every_check_and_fault_has_a_section_and_every_command_too() -> None:
    sections = set(re.findall(r"^### (.*)$", (generate.DOCS / "checks.md").read_text(), re.M))
    assert {f"{info.code} {info.name}" for info in checks().values()} | set(faults()) == sections
    assert len(sections) > 50
    sections = set(
        re.findall(r"^## opdtool (.*)$", (generate.DOCS / "commands.md").read_text(), re.M)
    )
    assert sections == set(COMMANDS)


def test_every_command_is_shown_in_some_page() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    shown = set(re.findall(r"opdtool (?:--\S+ )*([a-z0-9-]+)", text))
    assert set(COMMANDS) <= shown


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    ]
    assert len(links) > 10
    assert not [link for page, link in links if not (page.parent / link).exists()]


def test_the_index_names_every_page() -> None:
    index = (generate.DOCS / "README.md").read_text()
    names = {page.name for page in generate.DOCS.glob("*.md")} - {"README.md"}
    assert len(names) >= 8
    assert not [name for name in names if f"]({name})" not in index]


def test_the_shown_suite_is_the_shipped_one() -> None:
    (shown, *_) = generate.fenced((generate.DOCS / "suites.md").read_text(), "toml")
    assert shown == (generate.ROOT / "fixtures" / "suite.toml").read_text()


def test_python_blocks_are_python() -> None:
    blocks = [b for page in PAGES for b in generate.fenced(page.read_text(), "python")]
    assert len(blocks) >= 5
    for block in blocks:
        compile(block, "page", "exec")


def test_the_shipped_suite_passes_on_the_example_data(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(fixtures, folder, ignore=shutil.ignore_patterns("__pycache__"))
    done = cli("check", folder / "suite.toml", "--format", "concise")
    assert done.status == 0, done.out + done.err
    assert done.out.splitlines()[-1].startswith("PASSED check")


def page_is_current(page: Path) -> None:
    text = page.read_text()
    made = generate.remade(page)
    if not same_but_for_rounding(text, made):
        diff = difflib.unified_diff(text.split("\n"), made.split("\n"), "shown", "printed", n=1)
        pytest.fail("run `make docs`; it changes\n" + "\n".join(diff), pytrace=False)


def test_the_readme_s_output_is_what_the_tool_prints() -> None:
    page_is_current(generate.ROOT / "README.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_a_page_s_commands_are_run_and_print_what_it_shows(page: Path) -> None:
    page_is_current(page)


RECIPE = re.compile(r"^\s*(?:- )?(?:run: |entry: )?(opdtool .*?)(?: \|\| exit 1)?$", re.M)


@pytest.mark.slow
def test_the_commands_of_the_ci_recipes_pass_on_the_example_data(tmp_path: Path) -> None:
    text = (generate.DOCS / "ci.md").read_text()
    found = [c for block in generate.fenced(text, "yaml", "sh") for c in RECIPE.findall(block)]
    assert len(found) >= 5
    folder = generate.workspace(tmp_path / "data")
    outputs = generate.run_commands([f"{command}; echo exit $?" for command in found], folder)
    for command, output in zip(found, outputs, strict=True):
        assert output.splitlines()[-1] == "exit 0", command + "\n" + output
        assert shlex.split(command)[0] == "opdtool"
    assert (folder / "junit.xml").exists()
    assert (folder / "report.html").exists()


def sh_blocks(page: str) -> list[str]:
    return generate.fenced((generate.DOCS / page).read_text(), "sh")


def bash_blocks_of_the_readme() -> list[str]:
    return generate.fenced((generate.ROOT / "README.md").read_text(), "bash")


def test_the_readme_s_commands_stand_in_the_folder_that_it_makes_first() -> None:
    text = (generate.ROOT / "README.md").read_text()
    make, enter, *_ = bash_blocks_of_the_readme()
    assert "make demo" in make
    assert enter.splitlines() == [
        ". .venv/bin/activate",
        "opdtool demo first-steps && cd first-steps",
    ]
    assert text.index(enter) < text.index("```console")


@pytest.mark.slow
def test_the_readme_s_commands_for_ranks_run_in_that_folder(tmp_path: Path) -> None:
    blocks = [block for block in bash_blocks_of_the_readme() if "torchrun" in block]
    assert blocks
    folder = generate.workspace(tmp_path / "data")
    outputs = generate.run_commands([f"{block.strip()}; echo exit $?" for block in blocks], folder)
    for block, output in zip(blocks, outputs, strict=True):
        assert output.splitlines()[-1] == "exit 0", block + "\n" + output


def test_all_pages_can_be_followed_in_one_folder() -> None:
    # No two pages write the same name, nor one that the demo has written.
    output = re.compile(r"-o (\S+)")
    written = {name: "demo" for step in STEPS for name in output.findall(step.line)}
    assert set(written) == {"packs", "mask.safetensors"}
    for page in PAGES:
        for block in generate.fenced(page.read_text(), "console", "sh", "bash"):
            for name in output.findall(block):
                assert name not in written, f"{page.name} writes {name}, as {written[name]} does"
                written[name] = page.name
    assert len(written) > 10


@pytest.mark.slow
def test_the_tutorial_begins_in_a_folder_that_has_what_it_uses(
    tmp_path: Path,
) -> None:
    (block,) = sh_blocks("tutorial.md")
    (output,) = generate.run_commands([f"{{ {block.strip()}; }} > /dev/null; pwd; ls"], tmp_path)
    where, *names = output.splitlines()
    assert where == str(tmp_path / "first-steps")
    data = {path.name for path in generate.workspace(tmp_path / "data").iterdir()}
    text = "".join(generate.fenced((generate.DOCS / "tutorial.md").read_text(), "console"))
    used = {name for name in data if name in text}
    assert len(used) >= 5
    assert used <= set(names)


def test_completion_is_installed_as_the_page_says(tmp_path: Path) -> None:
    (block,) = sh_blocks("configuration.md")
    # A real bash as the parent: the shell to install for is found among the ancestors.
    home = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{block.strip()}; exit $?"], env=os.environ | home, check=False
    )
    assert done.returncode == 0
    script = tmp_path / ".bash_completions" / "opdtool.sh"
    assert "_OPDTOOL_COMPLETE" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()


@pytest.mark.slow
def test_the_commands_for_one_node_s_ranks_run_on_the_example_data(tmp_path: Path) -> None:
    blocks = [block.strip() for block in sh_blocks("ranks.md") if "--nnodes" not in block]
    assert len(blocks) >= 2
    folder = generate.workspace(tmp_path / "data")
    outputs = generate.run_commands([f"{block}; echo exit $?" for block in blocks], folder)
    for block, output in zip(blocks, outputs, strict=True):
        assert output.splitlines()[-1] == "exit 0", block + "\n" + output
