"""``opdtool pack`` file to file, beside copying its outputs and hashing inputs and outputs.

The plain way is ``cp --reflink=never`` of the outputs, then ``sha256sum`` of inputs and
outputs: the least that a pack with a manifest has to move and to read.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.harness import Row, main, run
from opdtool.io.writer import save_tensors

WIDTH = 4096
ROWS = {"small": 256, "middle": 2048, "large": 8192}


def rows(scale: str) -> list[Row]:
    """One pack of log-normal lengths, and the same split into microbatches, at CP 2."""
    found = []
    with TemporaryDirectory() as folder:
        batch = Path(folder) / "batch.safetensors"
        tokens = make_batch(batch, ROWS[scale])
        for name, more in (("pack, one", []), ("pack, microbatches", ["--max-tokens", "65536"])):
            ours, plain = measure(batch, Path(folder), more)
            found.append(
                Row(
                    name=name,
                    size=f"{ROWS[scale]} x {WIDTH}",
                    ours=ours,
                    plain=plain,
                    ratio=ours / plain,
                    goal="<= 1" if scale == "large" else "",
                    reached=ours <= plain if scale == "large" else None,
                    work=tokens,
                )
            )
    return found


def make_batch(path: Path, count: int) -> int:
    """Write a batch of ``count`` rows; returns its real tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1500), 0.8, count), 2, WIDTH).astype(np.int64)
    real = np.arange(WIDTH) < lengths[:, None]
    save_tensors(
        path,
        {
            "input_ids": torch.from_numpy(rng.integers(1, 150_000, (count, WIDTH)) * real),
            "input_lengths": torch.from_numpy(lengths),
            "token_mask": torch.from_numpy((rng.random((count, WIDTH)) < 0.7) & real).float(),
            "sample_mask": torch.ones(count),
        },
    )
    return int(lengths.sum())


def measure(batch: Path, folder: Path, more: list[str]) -> tuple[float, float]:
    """Seconds of the fastest of three runs of ours and of the plain way, taking turns."""
    ours, plain = [], []
    for _ in range(3):
        shutil.rmtree(folder / "packs", ignore_errors=True)
        shutil.rmtree(folder / "copies", ignore_errors=True)
        argv: list[str | Path] = [
            "-m",
            "opdtool",
            "pack",
            batch,
            "-o",
            folder / "packs",
            "--cp",
            "2",
            *more,
            "-q",
        ]
        packed = run([sys.executable, *argv])
        assert packed.returncode == 0, packed.output
        # The start of the interpreter and of torch is not packing.
        ours.append(packed.wall - run([sys.executable, "-c", "import torch"]).wall)
        script = (
            f"mkdir {folder}/copies && cp --reflink=never {folder}/packs/*.safetensors "
            f"{folder}/copies && sync {folder}/copies/* && "
            f"sha256sum {batch} {folder}/packs/*.safetensors"
        )
        copied = run(["bash", "-c", script])
        assert copied.returncode == 0, copied.output
        plain.append(copied.wall)
    return min(ours), min(plain)


if __name__ == "__main__":
    main(rows, __doc__ or "")
