"""``--max-memory`` is kept by every command that computes, to within one overhead for all.

The peak is that of a process of its own, less what one that does nothing needs. Inputs are many
times the memory given, so that reading one whole would show.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from opdtool.cli.start import COMMANDS
from tests.robust.conftest import FIXTURES, Ended, Server, a_batch, save

MIB = 1 << 20
MEMORY = 16 * MIB
OVERHEAD = 64 * MIB
"""What a command may need beyond ``--max-memory``: its own objects, buffers of the reader, the
hash and the writer, the least that is held at a time, and what torch sets aside."""
WRITING = 208 * MIB
"""The same for reconstruct, which writes and compares products while it makes others."""
MOST = 512 * MIB
"""What any of them may need however much it is given: more at a time is no faster."""

WITHOUT = {
    "rescale": "holds one JSON object of at most 64 MiB",
    "convert": "torch maps the file, whose pages the kernel takes back",
    "check": "runs other commands",
    "explain": "reads nothing",
    "demo": "writes the example data",
}
"""Commands that take no ``--max-memory``, and why."""


class Peaks:
    """Peaks of commands above that of one that does nothing."""

    def __init__(self, run: Server) -> None:
        self._run = run
        self._base = run("--version").peak

    def __call__(self, *argv: object, status: int = 0) -> tuple[Ended, int]:
        ended = self._run(*argv)
        assert ended.status == status, ended.err or ended.out
        return ended, ended.peak - self._base

    def within(self, limit: int, *argv: object, status: int = 0) -> None:
        """The command ends so, and needs no more."""
        _, peak = self(*argv, status=status)
        assert peak <= limit, f"{argv}: {peak / MIB:.0f} MiB, more than {limit / MIB:.0f}"


@pytest.fixture(scope="module")
def peaks(run: Server) -> Peaks:
    return Peaks(run)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("limits")
    yield folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


@dataclass(frozen=True, slots=True)
class Case:
    """A command line on inputs of many times the memory, and how it ends."""

    name: str
    argv: tuple[object, ...]
    status: int = 0


class Inputs:
    """What the commands read: 100 to 130 MiB each, right ones and wrong ones, made when asked
    for."""

    def __init__(self, folder: Path, run: Server) -> None:
        self.folder, self._run = folder, run

    @cached_property
    def long(self) -> Path:
        """A batch: 96 MiB."""
        tensors = a_batch(2048, 4096)
        del tensors["advantages"]
        return save(self.folder / "long.safetensors", tensors)

    @cached_property
    def mask(self) -> Path:
        return self._made("build-mask", self.long, "mask.safetensors")

    @cached_property
    def packs(self) -> Path:
        return self._made("pack", self.long, "packs")

    def wrong_mask(self, name: str) -> Path:
        """The mask rolled once more, with one slot flipped, or of noise."""
        path = self.folder / f"mask-{name}.safetensors"
        tensors = load_file(self.mask)
        mask = tensors["draft_token_mask"]
        if name == "rolled":
            wrong = torch.roll(mask, 1, -1)
        elif name == "flipped":
            wrong = mask.clone()
            wrong[0, 12345] = 1 - wrong[0, 12345]
        else:
            random = torch.Generator().manual_seed(0)
            wrong = (torch.rand(mask.shape, generator=random) < 0.5).float()
        return save(path, {**tensors, "draft_token_mask": wrong})

    @cached_property
    def wrong_pack(self) -> Path:
        tensors = load_file(self.packs / "pack-00000.safetensors")
        tensors["input_ids"] = torch.roll(tensors["input_ids"], 1, -1)
        return save(self.folder / "wrong-pack.safetensors", tensors)

    @cached_property
    def logits(self) -> Path:
        """128 MiB."""
        logits = torch.rand(4, 256, 32768)
        return save(self.folder / "logits.safetensors", {"teacher_full_logits": logits})

    @cached_property
    def half(self) -> Path:
        return save(self.folder / "half.safetensors", {"d2t": torch.arange(16384)})

    @cached_property
    def drafted(self) -> Path:
        return self._made("map-d2t", self.logits, "drafted.safetensors", "--d2t", self.half)

    @cached_property
    def other_drafted(self) -> Path:
        drafted = load_file(self.drafted)["teacher_logits"]
        rolled = torch.roll(drafted, 1, -1)
        return save(self.folder / "other.safetensors", {"teacher_logits": rolled})

    @cached_property
    def head(self) -> Path:
        """128 MiB."""
        head = torch.randn(32768, 1024)
        return save(self.folder / "head.safetensors", {"lm_head.weight": head})

    @cached_property
    def hidden(self) -> Path:
        hidden = {"teacher_full_hidden_states": torch.randn(2, 128, 1024)}
        return save(self.folder / "hidden.safetensors", hidden)

    @cached_property
    def rebuilt(self) -> Path:
        return self._made("reconstruct", self.hidden, "rebuilt", "--head", self.head)

    @cached_property
    def scaled(self) -> Path:
        logits = load_file(next(self.rebuilt.glob("*.safetensors")))["teacher_logits"]
        return save(self.folder / "scaled.safetensors", {"teacher_logits": 1.5 * logits})

    @cached_property
    def payload(self) -> Path:
        tensors = {
            "input_ids": torch.ones(64, 1024, dtype=torch.int64),
            "teacher_full_hidden_states": torch.randn(64, 1024, 512),
        }
        return save(self.folder / "payload.safetensors", tensors)

    def _made(self, command: str, source: Path, name: str, *more: object) -> Path:
        out = self.folder / name
        ended = self._run(command, source, *more, "-o", out)
        assert ended.status == 0, ended.err
        return out

    def cases(self, command: str) -> list[Case]:
        """Command lines of one command: what passes, and what fails and is diagnosed."""
        out = self.folder / "out"
        to = ("-o", out, "--force")
        file = ("-o", f"{out}.safetensors", "--force")

        def of_long() -> tuple[object, ...]:
            return ("--batch", self.long)

        def rebuild() -> tuple[object, ...]:
            return ("reconstruct", self.hidden, "--head", self.head)

        def mapped() -> tuple[object, ...]:
            return ("map-d2t", self.logits, "--d2t", self.half)

        def pack() -> Path:
            return self.packs / "pack-00000.safetensors"

        lines: dict[str, Callable[[], list[Case]]] = {
            "pack": lambda: [Case("a batch", ("pack", self.long, *to))],
            "unpack": lambda: [Case("a pack", ("unpack", self.packs, *file))],
            "verify-pack": lambda: [
                Case("right", ("verify-pack", self.packs, *of_long())),
                Case("wrong", ("verify-pack", self.wrong_pack, *of_long()), 1),
            ],
            "build-mask": lambda: [
                Case("one file", ("build-mask", self.long, *file)),
                Case("two ranks", ("build-mask", self.long, *file, "--cp", 2)),
            ],
            "verify-mask": lambda: [
                Case("right", ("verify-mask", self.mask, *of_long())),
                Case("rolled", ("verify-mask", self.wrong_mask("rolled"), *of_long()), 1),
                Case("one slot", ("verify-mask", self.wrong_mask("flipped"), *of_long()), 1),
                Case("noise", ("verify-mask", self.wrong_mask("noise"), *of_long()), 1),
            ],
            "build-d2t": lambda: [
                Case(
                    "a batch",
                    ("build-d2t", self.long, *file, "--draft-vocab-size", 100, "--vocab-size", 500),
                )
            ],
            "verify-d2t": lambda: [
                Case(
                    "with a batch",
                    ("verify-d2t", FIXTURES / "draft", *of_long()),
                )
            ],
            "map-d2t": lambda: [
                Case("written", (*mapped(), *file)),
                Case("compared", (*mapped(), "--reference", self.drafted)),
                Case("differs", (*mapped(), "--reference", self.other_drafted), 1),
            ],
            "reconstruct": lambda: [
                Case("checked", rebuild()),
                Case("written", (*rebuild(), *to)),
                Case("compared", (*rebuild(), "--reference", self.rebuilt)),
                Case("differs", (*rebuild(), "--reference", self.scaled), 1),
            ],
            "simulate": lambda: [
                Case("long rows", ("simulate", self.long, "--cases", 1, "--tp", 2, "--cp", 2)),
                Case("a payload", ("simulate", self.payload, "--cases", 1, "--tp", 2, "--cp", 2)),
            ],
            "inspect": lambda: [Case("a batch", ("inspect", self.long))],
            "compare": lambda: [
                Case("equal", ("compare", self.logits, self.logits)),
                Case("differs", ("compare", pack(), self.wrong_pack), 1),
            ],
            "roll": lambda: [Case("ids", ("roll", pack(), "--name", "input_ids", *file))],
        }
        return lines[command]()


@pytest.fixture(scope="module")
def inputs(place: Path, run: Server) -> Inputs:
    return Inputs(place, run)


LIMITED = [name for name in COMMANDS if name not in WITHOUT]


def test_every_command_takes_a_limit_or_is_known_not_to() -> None:
    for command in COMMANDS:
        module = import_module(f"opdtool.cli.{command.replace('-', '_')}")
        takes = "max_memory" in signature(module.command).parameters
        assert takes == (command not in WITHOUT), command


QUICK = ("verify-mask", "build-mask", "inspect", "roll")


@pytest.mark.parametrize(
    "command",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LIMITED],
)
@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(MIB, id="tiny", marks=pytest.mark.slow),
        pytest.param(MEMORY, id="16MiB"),
        pytest.param(1 << 36, id="huge", marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_the_limit_and_one_overhead(
    command: str, memory: int, inputs: Inputs, peaks: Peaks
) -> None:
    cases = inputs.cases(command)
    assert cases
    for case in cases:
        overhead = WRITING if command == "reconstruct" else OVERHEAD
        most = min(memory + overhead, MOST)
        peaks.within(most, *case.argv, "--max-memory", memory, status=case.status)


@pytest.fixture(scope="module")
def wide(place: Path) -> Path:
    """320 rows x 1024 tokens x 256 features: 320 MiB."""
    tensors = a_batch(320, 1024)
    tensors["hidden"] = torch.rand(320, 1024, 256)
    path = save(place / "wide.safetensors", tensors)
    del tensors
    gc.collect()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_packing_and_unpacking_features_twenty_times_the_memory(
    cp: int, place: Path, wide: Path, peaks: Peaks
) -> None:
    packs, back = place / f"packs{cp}", place / "back.safetensors"
    memory, limit = ["--max-memory", MEMORY], MEMORY + OVERHEAD
    peaks.within(limit, "pack", wide, "-o", packs, "--cp", cp, *memory)
    peaks.within(limit, "unpack", packs, "-o", back, "--force", *memory)
    peaks.within(limit, "verify-pack", packs, "--batch", wide, *memory)
    if cp == 1:
        peaks.within(limit, "inspect", packs, *memory)
        out, pack = place / "next.safetensors", packs / "pack-00000.safetensors"
        peaks.within(limit, "roll", pack, "--name", "hidden", "-o", out, *memory)
        peaks.within(limit, "compare", back, back, *memory)
        tensors = load_file(pack)
        tensors["hidden"] = load_file(out)["hidden"]
        save(out, tensors)  # the features of the next token
        del tensors
        peaks.within(limit, "verify-pack", out, "--batch", wide, *memory, status=1)
        peaks.within(limit, "compare", pack, out, *memory, status=1)
        out.unlink()
    back.unlink()


@pytest.mark.slow
def test_one_row_of_many_times_the_memory_goes_through_every_command(
    place: Path, peaks: Peaks
) -> None:
    tensors = {
        "input_ids": torch.arange(16 << 20)[None] % 499,
        "token_mask": (torch.arange(16 << 20) % 3 != 0).float()[None],
    }
    one = save(place / "one.safetensors", tensors)
    del tensors
    memory, limit = ["--max-memory", MEMORY], MEMORY + OVERHEAD
    for cp in (1, 2):
        packs, back = place / f"one{cp}", place / f"one-back{cp}.safetensors"
        geometry = ["--cp", cp]
        peaks.within(limit, "pack", one, "-o", packs, *geometry, *memory)
        peaks.within(limit, "unpack", packs, "-o", back, *memory)
        peaks.within(limit, "compare", one, back, *memory)
        peaks.within(limit, "verify-pack", packs, "--batch", one, *memory)
        mask = place / f"one-mask{cp}.safetensors"
        peaks.within(limit, "build-mask", one, "-o", mask, *geometry, *memory)
        masks = sorted(place.glob(f"one-mask{cp}*"))
        peaks.within(limit, "verify-mask", *masks, "--batch", one, *geometry, *memory)
        wrong = ["--batch", one, *geometry, "--convention", "unshifted", *memory]
        peaks.within(limit, "verify-mask", *masks, *wrong, status=1)
    peaks.within(limit, "simulate", one, "--cp", 2, *memory)
    peaks.within(MOST, "simulate", one, "--cp", 2, "--max-memory", "64GiB")


@pytest.mark.slow
def test_a_pack_of_many_microbatches_is_not_held_whole(place: Path, peaks: Peaks) -> None:
    tensors = a_batch(4096, 1024)
    del tensors["advantages"]
    many = save(place / "many.safetensors", tensors)
    packs, other = place / "many-packs", place / "many-other"
    memory, limit = ["--max-memory", MEMORY], MEMORY + OVERHEAD
    split = ["--max-tokens", 4096]
    peaks.within(limit, "pack", many, "-o", packs, *split, *memory)
    peaks.within(limit, "verify-pack", packs, "--batch", many, *memory)
    tensors["token_mask"] = 1 - tensors["token_mask"]
    tensors["input_ids"] = tensors["input_ids"] + 1
    wrong = save(place / "many-wrong.safetensors", tensors)
    del tensors
    peaks.within(limit, "pack", wrong, "-o", other, *split, *memory)
    # What is wrong with each of 514 microbatches is kept until all are judged together.
    verdicts = 514 * 64 * 1024
    peaks.within(limit + verdicts, "verify-pack", other, "--batch", many, *memory, status=1)
    peaks.within(limit + verdicts, "verify-mask", other, "--batch", many, *memory, status=1)


@pytest.mark.slow
def test_logits_of_many_times_the_memory_are_mapped_on_two_ranks(
    inputs: Inputs, place: Path, peaks: Peaks
) -> None:
    line = ["map-d2t", inputs.logits, "--d2t", inputs.half, "-o", place / "two.safetensors"]
    peaks.within(MEMORY + OVERHEAD, *line, "--tp", 2, "--max-memory", MEMORY)
