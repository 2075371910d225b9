"""``opdtool demo``: the example data, and the main jobs run on it as they would be typed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from opdtool.cli.options import ForceOption
from opdtool.core.errors import InputError

DATA = (
    "batch.safetensors",
    "teacher_hidden.safetensors",
    "teacher_hidden_prenorm.safetensors",
    "teacher_logits.safetensors",
    "student_logits.safetensors",
    "logprobs.safetensors",
    "teacher-a",
    "teacher-b",
    "draft",
    "suite.toml",
    "metrics.json",
    "normalizers.json",
)
"""The example data by name: what the demo and the commands of the pages need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of the demo, the words before it, and the exit status it ends with."""

    words: str
    line: str
    status: int = 0


STEPS = (
    Step(
        words="Pack a padded batch for two context-parallel ranks, in microbatches of 256 slots.",
        line="pack batch.safetensors -o packs --cp 2 --max-tokens 256 --force",
    ),
    Step(
        words="Check those packs against the batch, as one would those of any framework.",
        line="verify-pack packs --batch batch.safetensors --format concise",
    ),
    Step(
        words="Build the draft-loss mask on its own, and verify it.",
        line="build-mask batch.safetensors -o mask.safetensors --force",
    ),
    Step(
        words="A mask that is right:",
        line="verify-mask mask.safetensors --batch batch.safetensors --format concise",
    ),
    Step(
        words="A mask that was never shifted: same shape, same sum but for a few tokens, wrong.",
        line="verify-mask unshifted.safetensors --batch batch.safetensors",
        status=1,
    ),
    Step(
        words="Check the draft model's vocabulary map against its checkpoint.",
        line="verify-d2t draft --format concise",
    ),
    Step(
        words="Rebuild both teachers' logits from hidden states and compare with recorded ones.",
        line="reconstruct teacher_hidden.safetensors --head 0=teacher-a --head 1=teacher-b "
        "--reference teacher_logits.safetensors",
    ),
)


def example_data() -> Path:
    """Where the example data lies: beside the package, or in the checkout around it."""
    package = Path(__file__).parents[1]
    for place in (package / "example", package.parent / "fixtures"):
        if (place / "batch.safetensors").is_file():
            return place
    raise InputError("the example data is not installed beside opdtool; install it again")


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to write the example data.")
    ] = Path("opdtool-demo"),
    force: ForceOption = False,
) -> None:
    """Write the example data and run the main jobs on it, showing each command."""
    from opdtool.cli.main import run

    write_data(directory, force=force)
    print(f"The example data is in {directory}; each command below is run there.")
    with chdir(directory), without_defaults():
        for step in STEPS:
            print(f"\n# {step.words}\n$ opdtool {step.line}\n", flush=True)
            status = run(["--isolated", *shlex.split(step.line)])
            sys.stdout.flush()
            if status == 130:
                raise KeyboardInterrupt
            if status != step.status:
                raise RuntimeError(
                    f"`opdtool {step.line}` ended with status {status}, not {step.status}"
                )
            if status:
                print(f"(exit status {status}: a check failed, as it should)")
    print("\nEvery command did what it should.")


def _is_default(variable: str) -> bool:
    return variable.startswith("OPDTOOL_") and variable != "OPDTOOL_TRACEBACK"


@contextmanager
def without_defaults() -> Iterator[None]:
    """Without the user's ``OPDTOOL_*``, which would change what the steps do and print."""
    before = {name: value for name, value in os.environ.items() if _is_default(name)}
    for name in before:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def write_data(directory: Path, *, force: bool) -> None:
    """Copy the example data, and make the broken mask that the demo shows.

    With ``force`` files of these names are replaced; nothing else is touched.

    Raises:
        InputError: the directory is not empty (without ``force``), or cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; name a directory for the example data")
    if not force and directory.is_dir() and any(directory.iterdir()):
        raise InputError(f"{directory} is not empty; name another directory, or pass --force")
    source = example_data()
    for name in DATA:
        files = [source / name] if (source / name).is_file() else sorted((source / name).iterdir())
        for file in files:
            copy(file, directory / file.relative_to(source))
    write_unshifted_mask(directory)


def copy(source: Path, target: Path) -> None:
    """Copy one file of the example data.

    Raises:
        InputError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise InputError(f"{target}: {error.strerror}; name a directory to write to") from None


def write_unshifted_mask(directory: Path) -> None:
    """The mistake of the demo: each row's own token mask, packed without the shift by one."""
    from opdtool.core.geometry import PackGeometry
    from opdtool.core.masks import token_weights
    from opdtool.core.packing import pack
    from opdtool.io.batch import open_batch
    from opdtool.io.writer import save_tensors

    with open_batch([directory / "batch.safetensors"]) as batch:
        layout = PackGeometry().layout(batch.lengths)
        weights = token_weights(batch.read("token_mask"), batch.sample_mask())
    mask = pack(weights, layout)[None]
    save_tensors(directory / "unshifted.safetensors", {"draft_token_mask": mask}, force=True)
