"""How long the command takes to say hello, beside importing what it is built on."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Row, main, run

EXAMPLE = Path(__file__).parents[1] / "fixtures" / "batch.safetensors"


def rows(scale: str) -> list[Row]:
    """``--version``, ``--help`` and a small ``verify-mask``; measured once, at one size."""
    if scale != "small":
        return []
    light = [sys.executable, "-c", "import typer, rich"]
    torch = [sys.executable, "-c", "import torch"]
    me = [sys.executable, "-m", "opdtool"]
    with TemporaryDirectory() as folder:
        mask = Path(folder) / "mask.safetensors"
        assert run([*me, "build-mask", str(EXAMPLE), "-o", str(mask)]).returncode == 0
        verify = [*me, "verify-mask", str(mask), "--batch", str(EXAMPLE)]
        return [
            compare("opdtool --version", [*me, "--version"], light, 2.0),
            compare("opdtool --help", [*me, "--help"], light, 2.0),
            compare("verify-mask, small", verify, torch, 1.3),
        ]


def compare(name: str, ours: list[str], plain: list[str], goal: float) -> Row:
    """The fastest of nine whole processes of each, taking turns."""
    walls: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):
        for command, found in zip((ours, plain), walls, strict=True):
            done = run(command)
            assert done.returncode == 0, done.output
            found.append(done.wall)
    mine, theirs = min(walls[0]), min(walls[1])
    return Row(
        name=name,
        size="whole process",
        ours=mine,
        plain=theirs,
        ratio=mine / theirs,
        goal=f"<= {goal:g}",
        reached=mine <= goal * theirs,
    )


if __name__ == "__main__":
    main(rows, __doc__ or "")
