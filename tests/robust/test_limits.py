"""``--max-memory`` is kept, to within a stated overhead, by every command that takes it, and
those that do not take it read no tensor whole.

The peak is that of a process of its own, less what one that does nothing needs. Inputs are many
times the memory given, so that reading one whole would show.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.robust.conftest import Ended, Server, a_batch, save

MIB = 1 << 20
MEMORY = 16 * MIB
OVERHEAD = 64 * MIB
"""What a command may need beyond ``--max-memory``: its own objects, buffers of the reader, the
hash and the writer, and what torch sets aside."""
BLOCKS = 208 * MIB
"""The same for commands that compare, in blocks of a fixed size, two files at a time."""


class Peaks:
    """Peaks of commands above that of one that does nothing."""

    def __init__(self, run: Server) -> None:
        self._run = run
        self._base = run("--version").peak

    def __call__(self, *argv: object) -> tuple[Ended, int]:
        ended = self._run(*argv)
        assert ended.status == 0, ended.err
        return ended, ended.peak - self._base

    def within(self, limit: int, *argv: object) -> None:
        """The command succeeds and needs no more."""
        _, peak = self(*argv)
        assert peak <= limit, f"{argv[0]}: {peak / MIB:.0f} MiB, more than {limit / MIB:.0f}"


@pytest.fixture(scope="module")
def peaks(run: Server) -> Peaks:
    return Peaks(run)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("limits")
    yield folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


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
    memory = ["--max-memory", MEMORY]
    peaks.within(MEMORY + OVERHEAD, "pack", wide, "-o", packs, "--cp", cp, *memory)
    peaks.within(MEMORY + OVERHEAD, "unpack", packs, "-o", back, "--force", *memory)
    peaks.within(MEMORY + BLOCKS, "verify-pack", packs, "--batch", wide, *memory)
    if cp == 1:
        peaks.within(BLOCKS, "inspect", packs)
        out = place / "rolled.safetensors"
        peaks.within(
            BLOCKS, "roll", packs / "pack-00000.safetensors", "--name", "hidden", "-o", out
        )
        peaks.within(BLOCKS, "compare", back, back)
        out.unlink()
    peaks.within(BLOCKS, "inspect", wide)
    back.unlink()


@pytest.mark.slow
def test_one_row_of_many_times_the_memory_is_packed_and_unpacked(place: Path, peaks: Peaks) -> None:
    tensors = {"input_ids": torch.ones(1, 16 << 20, dtype=torch.int64)}
    one = save(place / "one.safetensors", tensors)
    del tensors
    memory = ["--max-memory", MEMORY]
    for cp in (1, 2):
        packs, back = place / f"one{cp}", place / f"one-back{cp}.safetensors"
        peaks.within(MEMORY + OVERHEAD, "pack", one, "-o", packs, "--cp", cp, *memory)
        peaks.within(MEMORY + OVERHEAD, "unpack", packs, "-o", back, *memory)
        assert back.read_bytes() == one.read_bytes()


def test_masks_and_counts_of_many_times_the_memory(place: Path, peaks: Peaks) -> None:
    tensors = a_batch(2048, 4096)
    del tensors["advantages"]
    batch = save(place / "long.safetensors", tensors)
    del tensors
    memory = ["--max-memory", MEMORY]
    mask, d2t = place / "mask.safetensors", place / "d2t.safetensors"
    peaks.within(MEMORY + OVERHEAD, "build-mask", batch, "-o", mask, *memory)
    peaks.within(MEMORY + OVERHEAD, "verify-mask", mask, "--batch", batch, *memory)
    sizes = ["--draft-vocab-size", 100, "--vocab-size", 500]
    peaks.within(MEMORY + OVERHEAD, "build-d2t", batch, "-o", d2t, *sizes, *memory)


@pytest.mark.slow
def test_logits_and_heads_of_many_times_the_memory(place: Path, peaks: Peaks) -> None:
    logits = {"teacher_full_logits": torch.rand(4, 256, 32768)}
    whole = save(place / "logits.safetensors", logits)  # 128 MiB
    del logits
    d2t = save(place / "half.safetensors", {"d2t": torch.arange(16384)})
    head = save(place / "head.safetensors", {"lm_head.weight": torch.randn(32768, 512)})
    hidden = save(
        place / "hidden.safetensors", {"teacher_full_hidden_states": torch.randn(2, 256, 512)}
    )
    memory = ["--max-memory", MEMORY]
    out = place / "mapped.safetensors"
    for tp in (1, 2):
        line = ["map-d2t", whole, "--d2t", d2t, "-o", out, "--tp", tp, "--force"]
        peaks.within(MEMORY + OVERHEAD, *line, *memory)
    line = ["reconstruct", hidden, "--head", head, *memory]
    peaks.within(MEMORY + OVERHEAD, *line)
    peaks.within(MEMORY + BLOCKS, *line, "-o", place / "rebuilt")
    peaks.within(MEMORY + BLOCKS, *line, "--reference", place / "rebuilt")
