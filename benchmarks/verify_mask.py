"""``opdtool verify-mask`` on masks that grow, beside the obvious script that holds it all.

The plain way loads both files, multiplies, packs, rolls and compares in memory. Ours reads
each file once, in blocks: its time grows with the mask and its memory does not. A check that
fails, and says why, stands beside the same one that passes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.harness import Row, Run, main, run
from opdtool.io.writer import save_tensors

WIDTH = 4096
ROWS = {"small": 1_000, "middle": 8_000, "large": 50_000}
BOUND = 256 << 20
"""Bytes above the interpreter with torch that a check may take, whatever the mask's size."""

PLAIN = """
import sys, torch
from safetensors.torch import load_file
batch, dump = load_file(sys.argv[1]), load_file(sys.argv[2])
weights = batch["token_mask"] * batch["sample_mask"][:, None]
real = torch.arange(weights.shape[1]) < batch["input_lengths"][:, None]
packed = weights[real]
rolled = torch.roll(packed, -1)
rolled[batch["input_lengths"].cumsum(0) - 1] = 0
assert torch.equal(rolled, dump["draft_token_mask"][0])
"""


def rows(scale: str) -> list[Row]:
    """Time and peak memory of a check that passes."""
    with TemporaryDirectory() as folder:
        batch, dump = Path(folder) / "batch.safetensors", Path(folder) / "mask.safetensors"
        slots = make(batch, dump, ROWS[scale])
        ours: list[str | Path] = [
            sys.executable,
            "-m",
            "opdtool",
            "verify-mask",
            dump,
            "--batch",
            batch,
            "-q",
        ]
        plain: list[str | Path] = [sys.executable, "-c", PLAIN, batch, dump]
        wrong = make_wrong(batch, dump, Path(folder))
        failing = {
            name: [path if part is dump else part for part in ours] for name, path in wrong.items()
        }
        bare = run([sys.executable, "-c", "import torch"])
        mine: list[Run] = []
        theirs: list[Run] = []
        for _ in range(2):
            for command, found in ((ours, mine), (plain, theirs)):
                done = run(command)
                assert done.returncode == 0, done.output
                found.append(done)
        slower = {
            name: min((run(command) for _ in range(2)), key=lambda done: done.wall)
            for name, command in failing.items()
        }
        assert all(done.returncode == 1 for done in slower.values())
    size = f"{slots / 1e6:,.1f} M slots"
    wall, wall_plain = min(done.wall for done in mine), min(done.wall for done in theirs)
    extra = max(done.peak_rss for done in mine) - bare.peak_rss
    extra_plain = max(done.peak_rss for done in theirs) - bare.peak_rss
    return [
        Row(
            name="verify-mask, passing",
            size=size,
            ours=wall,
            plain=wall_plain,
            ratio=wall / wall_plain,
            work=slots,
        ),
        Row(
            name="verify-mask, memory above torch",
            size=size,
            ours=extra,
            plain=extra_plain,
            ratio=extra / extra_plain,
            goal=f"<= {BOUND >> 20} MiB",
            reached=extra <= BOUND,
            unit="B",
        ),
        *(
            Row(
                name=f"verify-mask, failing: {name}",
                size=size,
                ours=done.wall,
                plain=wall,
                ratio=done.wall / wall,
                goal="<= 2 of passing",
                reached=done.wall <= 2 * wall,
                work=slots,
            )
            for name, done in slower.items()
        ),
    ]


def make_wrong(batch: Path, dump: Path, folder: Path) -> dict[str, Path]:
    """Masks with a mistake in them, by what it is."""
    rows, right = load_file(batch), load_file(dump)["draft_token_mask"]
    real = torch.arange(WIDTH) < rows["input_lengths"][:, None]
    flipped = right.clone()
    flipped[0, -7] = 1 - flipped[0, -7]
    kept = (rows["token_mask"] * rows["sample_mask"][:, None])[real]
    masks = {
        "not shifted": kept[None],
        "one slot": flipped,
        "noise": (torch.rand(right.shape) < 0.5).float(),
    }
    paths = {name: folder / f"{name}.safetensors" for name in masks}
    for name, path in paths.items():
        save_tensors(path, {"draft_token_mask": masks[name]})
    return paths


def make(batch: Path, dump: Path, count: int) -> int:
    """Write a batch of ``count`` rows and its right mask, unpadded; returns the slots."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(3900), 0.2, count), 2, WIDTH).astype(np.int64)
    mask = np.zeros((count, WIDTH), dtype=np.float32)
    for row, prompt in zip(mask, rng.integers(0, 1000, count).tolist(), strict=True):
        row[prompt:] = 1.0
    sample = (rng.random(count) < 0.9).astype(np.float32)
    packed = np.empty(int(lengths.sum()), dtype=np.float32)
    end = 0
    for row, length, kept in zip(mask, lengths.tolist(), sample.tolist(), strict=True):
        packed[end : end + length - 1] = row[1:length] * kept
        packed[end + length - 1] = 0
        end += length
    save_tensors(
        batch,
        {
            "token_mask": torch.from_numpy(mask),
            "sample_mask": torch.from_numpy(sample),
            "input_lengths": torch.from_numpy(lengths),
        },
    )
    save_tensors(dump, {"draft_token_mask": torch.from_numpy(packed)[None]})
    return len(packed)


if __name__ == "__main__":
    main(rows, __doc__ or "")
