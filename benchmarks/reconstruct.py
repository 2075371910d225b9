"""``opdtool reconstruct``: its arithmetic beside bare matmuls, its memory beside its limit.

The plain way is the same ``torch.matmul`` calls on operands that are in memory already. Memory is
the peak of a child process, less that of an interpreter that has imported torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import Row, main, run
from opdtool.io.checkpoints import HeadSpec
from opdtool.io.writer import TensorFileWriter, TensorSpec, save_tensors
from opdtool.jobs.reconstruct.inputs import make_plan
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.run import run as reconstruct
from opdtool.jobs.reconstruct.sizes import sizes_for

HIDDEN = 2048
VOCABULARY = {"small": 16_384, "middle": 65_536, "large": 151_936}
POSITIONS = {"small": (2, 256), "middle": (4, 512), "large": (4, 1024)}
MEMORY_POSITIONS = {"small": (2, 512), "middle": (4, 1024), "large": (8, 2048)}
DRAFT = {"small": 3_456, "middle": 13_824, "large": 32_000}
LIMIT = {"small": 128 << 20, "middle": 512 << 20, "large": 1 << 30}
REPEATS = 3


def rows(scale: str) -> list[Row]:
    """Arithmetic, draft columns, and memory at one size."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        V = VOCABULARY[scale]
        make_head(folder / "head.safetensors", V)
        torch.manual_seed(0)
        ids = torch.randperm(V)[: DRAFT[scale]].sort()[0]
        save_tensors(folder / "d2t.safetensors", {"d2t": ids - torch.arange(len(ids))})
        return [*speed(folder, scale), *memory(folder, scale)]


def make_head(path: Path, V: int) -> None:
    """A head [V, H] in bfloat16, written in parts."""
    with TensorFileWriter(path, [TensorSpec("lm_head.weight", "BF16", (V, HIDDEN))]) as file:
        for low in range(0, V, 8192):
            count = min(8192, V - low)
            file.write("lm_head.weight", (torch.randn(count, HIDDEN) * 0.02).bfloat16(), low)


def make_payload(path: Path, shape: tuple[int, int]) -> None:
    """Hidden states [B, S, H] in bfloat16."""
    hidden = torch.randn(*shape, HIDDEN).bfloat16()
    save_tensors(path, {"teacher_full_hidden_states": hidden})


def speed(folder: Path, scale: str) -> list[Row]:
    """Check only, whole vocabulary and draft columns, beside the bare products."""
    shape, V = POSITIONS[scale], VOCABULARY[scale]
    make_payload(folder / "payload.safetensors", shape)
    job = job_for(folder, "payload.safetensors", LIMIT["large"])
    sizes = sizes_for(make_plan(job))
    hidden = torch.randn(shape[0] * shape[1], HIDDEN).bfloat16()
    head = (torch.randn(V, HIDDEN) * 0.02).bfloat16()

    def plain() -> None:
        for low in range(0, V, sizes.columns):
            for start in range(0, len(hidden), sizes.tile):
                torch.matmul(
                    hidden[start : start + sizes.tile], head[low : low + sizes.columns].t()
                )

    def ours() -> None:
        assert reconstruct(job).passed

    reference = folder / "compared.safetensors"
    spec = TensorSpec("teacher_full_logits", "BF16", (*shape, V))
    with TensorFileWriter(reference, [spec]) as file:
        file.leave_zero("teacher_full_logits", shape[0] * shape[1] * V)
    comparing = replace(job, reference=[reference], atol=1e9)
    wide = hidden.float()

    def plain_wide() -> None:
        for low in range(0, V, sizes.columns):
            rows = head[low : low + sizes.columns].float()
            for start in range(0, len(hidden), sizes.tile):
                torch.matmul(wide[start : start + sizes.tile], rows.t())

    def compared() -> None:
        assert reconstruct(comparing).passed

    draft = job_for(folder, "payload.safetensors", LIMIT["large"], folder / "d2t.safetensors")
    whole, bare, cut, checked, bare_wide = take_turns(
        [ours, plain, lambda: reconstruct(draft), compared, plain_wide]
    )
    positions = shape[0] * shape[1]
    size = f"{positions} x {HIDDEN} x {V}"
    promised = scale == "large"
    return [
        Row(
            name="reconstruct, check only",
            size=size,
            ours=whole,
            plain=bare,
            ratio=bare / whole,
            goal=">= 0.9" if promised else "",
            reached=bare / whole >= 0.9 if promised else None,
            work=positions * V,
        ),
        Row(
            name="reconstruct --d2t, against the whole vocabulary",
            size=f"{positions} x {HIDDEN} x {DRAFT[scale]}",
            ours=cut,
            plain=whole,
            ratio=whole / cut,
            goal=">= 4" if promised else "",
            reached=whole / cut >= 4 if promised else None,
            work=positions * DRAFT[scale],
        ),
        Row(
            name="reconstruct --reference, against float32 products",
            size=size,
            ours=checked,
            plain=bare_wide,
            ratio=checked / bare_wide,
            goal="<= 1.15" if promised else "",
            reached=checked / bare_wide <= 1.15 if promised else None,
            work=positions * V,
        ),
    ]


def memory(folder: Path, scale: str) -> list[Row]:
    """Peak memory of a check, and of one against a reference larger than the limit."""
    shape, V, limit = MEMORY_POSITIONS[scale], VOCABULARY[scale], LIMIT[scale]
    make_payload(folder / "many.safetensors", shape)
    base = run([sys.executable, "-c", "import torch"]).peak_rss
    found = []
    # Left zero, the file takes no disk, and is as many bytes to read as any.
    reference = folder / "reference.safetensors"
    with TensorFileWriter(
        reference, [TensorSpec("teacher_full_logits", "BF16", (*shape, V))]
    ) as file:
        file.leave_zero("teacher_full_logits", shape[0] * shape[1] * V)
    for name, more in (
        ("memory of reconstruct", []),
        ("memory of reconstruct --reference", ["--reference", str(reference), "--atol", "1e9"]),
    ):
        argv = [
            sys.executable, "-m", "opdtool", "reconstruct", str(folder / "many.safetensors"),
            "--head", str(folder / "head.safetensors"), "--max-memory", str(limit), "-q", *more,
        ]  # fmt: skip
        done = run(argv)
        assert done.returncode == 0, done.output
        peak = done.peak_rss - base
        found.append(
            Row(
                name=name,
                size=f"{shape[0]} x {shape[1]} x {V}",
                ours=float(peak),
                plain=float(limit),
                ratio=peak / limit,
                goal="<= 1",
                reached=peak <= limit,
                unit="B",
            )
        )
    return found


def job_for(folder: Path, payload: str, limit: int, d2t: Path | None = None) -> ReconstructJob:
    """The command as typed."""
    return ReconstructJob(
        payload=folder / payload,
        heads=[HeadSpec(0, folder / "head.safetensors", None)],
        max_memory=limit,
        d2t=d2t,
        device="cpu",
    )


def take_turns(calls: Sequence[object]) -> list[float]:
    """Seconds of the fastest call of each, taking turns, so that a busy spell hits all."""
    fastest = [float("inf")] * len(calls)
    for _ in range(REPEATS):
        for at, call in enumerate(calls):
            assert callable(call)
            begin = time.perf_counter()
            call()
            fastest[at] = min(fastest[at], time.perf_counter() - begin)
    return fastest


if __name__ == "__main__":
    main(rows, __doc__ or "")
