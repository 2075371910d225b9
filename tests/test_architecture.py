"""Rules of the house that the imports themselves must show."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import opdtool
from opdtool.cli.main import COMMANDS

ROOT = Path(opdtool.__file__).parent
GROUND = {"core", "findings"}
MIDDLE = {"report", "checks", "ranks", "io", "loss_utils"}


def imports_of(path: Path, *, top_only: bool = False) -> set[str]:
    """The modules that a file imports, absolute names."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skip = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if top_only and id(node) in skip:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(name: str) -> str | None:
    """The part of opdtool that a module belongs to: core, io, report, ..."""
    words = name.split(".")
    return words[1] if words[0] == "opdtool" and len(words) > 1 else None


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT)
    here = relative.parts[0].removesuffix(".py")
    targets = {part for name in imports_of(path) if (part := part_of(name))} - {"__version__"}
    if here in GROUND:
        assert targets <= {here}, f"{relative} is on the ground, yet imports {targets}"
    elif here in MIDDLE:
        assert targets <= {here} | GROUND, f"{relative} imports {targets - GROUND}"
    elif here == "jobs":
        assert "cli" not in targets, f"{relative} is below the command line, yet imports it"
        assert "typer" not in {name.split(".")[0] for name in imports_of(path)}
    else:
        assert here in {"cli", "__init__", "__main__"}, f"{relative} has no place in the house"


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if path.relative_to(ROOT).parts[0] in {"report", "findings.py", "__init__.py"}
        or path.relative_to(ROOT).parts[:2] == ("checks", "texts")
        or path.relative_to(ROOT).parts == ("checks", "registry.py")
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_is_imported_at_start_up_knows_no_torch(path: Path) -> None:
    heavy = {"torch", "numpy", "safetensors"}
    assert not {name.split(".")[0] for name in imports_of(path, top_only=True)} & heavy


EVERY_HELP = [[name, "--help"] for name in COMMANDS]


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["explain"], *EVERY_HELP], ids=" ".join
)
def test_help_and_version_do_not_import_torch(argv: list[str]) -> None:
    code = (
        "import sys; from opdtool.cli.main import run; status = run(sys.argv[1:]);"
        "loaded = sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules));"
        "sys.exit(f'status {status}, loaded {loaded}' if status or loaded else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, opdtool; opdtool.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_imported() -> None:
    assert len(opdtool.__all__) > 20
    for name in opdtool.__all__:
        assert getattr(opdtool, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        opdtool.nothing_like_it  # noqa: B018


def test_loss_utils_has_the_reference_s_names() -> None:
    from opdtool import loss_utils

    for name in (
        "rescale_loss_metrics",
        "map_teacher_logits_to_draft_vocab",
        "roll_packed_seq_dim",
        "pack_rolled_draft_token_mask",
        "_project_hidden_states_per_teacher",
        "reconstruct_opd_full_teacher_logits",
        "_pack_input_ids",
        "MetricNormalizer",
    ):
        assert callable(getattr(loss_utils, name))


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opdtool", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"opdtool {opdtool.__version__}\n")
