"""The draft vocabulary: counting tokens, and the columns that tensor parallelism moves.

Counting is shown beside ``torch.bincount`` alone on trained ids that lie ready in memory; ours
reads the batch files, both masks and the lengths, and picks the trained tokens. Mapping is
shown beside gathering the whole vocabulary on every rank and indexing that.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Row, best_each, main, run
from opdtool.core.exchange import ColumnPlan
from opdtool.core.vocab import d2t_from_ids, map_teacher_logits_to_draft_vocab
from opdtool.io.writer import save_tensors
from opdtool.jobs.token_counts import count_sources
from opdtool.ranks.simulated import SimulatedGroup, run_simulated

VOCAB = 151_936
WIDTH = 4096
FILES = 4
TOKENS = {"small": 1_000_000, "middle": 10_000_000, "large": 100_000_000}
POSITIONS = {"small": 16, "middle": 64, "large": 256}
DRAFT = 32_000
BOUND = 256 << 20
"""What a build may need beyond torch, however many tokens there are."""


def rows(scale: str) -> list[Row]:
    """Counting and mapping at one scale."""
    return counting(scale) + mapping(scale)


def counting(scale: str) -> list[Row]:
    """Time and peak memory of ``build-d2t``'s single pass."""
    with TemporaryDirectory() as folder:
        sources = [Path(folder) / f"batch-{i}.safetensors" for i in range(FILES)]
        count = TOKENS[scale] // FILES // WIDTH
        ready = [make_batch(path, count, seed) for seed, path in enumerate(sources)]
        tokens = FILES * count * WIDTH
        begin = time.perf_counter()
        alone = sum(
            (torch.bincount(ids, minlength=VOCAB) for ids in ready),
            start=torch.zeros(VOCAB, dtype=torch.int64),
        )
        plain = time.perf_counter() - begin
        begin = time.perf_counter()
        counted = count_sources(sources, vocab_size=VOCAB)
        ours = time.perf_counter() - begin
        assert torch.equal(counted.counts, alone)
        del ready
        argv = ["--draft-vocab-size", str(DRAFT), "--vocab-size", str(VOCAB), "-q"]
        command: list[str | Path] = [
            "-m",
            "opdtool",
            "build-d2t",
            *sources,
            *argv,
            "-o",
            Path(folder) / "d2t",
        ]
        built = run([sys.executable, *command])
        assert built.returncode == 0, built.output
        idle = run([sys.executable, "-c", "import torch"])
    size = f"{tokens:,} tokens"
    above = built.peak_rss - idle.peak_rss
    return [
        Row(
            name="build-d2t, counting, beside torch.bincount alone",
            size=size,
            ours=ours,
            plain=plain,
            ratio=plain / ours,
            work=tokens,
        ),
        Row(
            name="build-d2t, memory beyond torch's own",
            size=size,
            ours=float(above),
            plain=None,
            ratio=None,
            goal="< 256 MiB",
            reached=above < BOUND,
            unit="B",
        ),
    ]


def make_batch(path: Path, count: int, seed: int) -> Tensor:
    """Write a batch with ids as frequent as words are; returns its trained ids."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.2, (count, WIDTH)), VOCAB) - 1
    mask = rng.random((count, WIDTH), dtype=np.float32) < 0.7
    lengths = rng.integers(WIDTH // 2, WIDTH + 1, count)
    sample = (rng.random(count) < 0.95).astype(np.float32)
    save_tensors(
        path,
        {
            "input_ids": torch.from_numpy(ids),
            "input_lengths": torch.from_numpy(lengths),
            "token_mask": torch.from_numpy(mask.astype(np.float32)),
            "sample_mask": torch.from_numpy(sample),
        },
    )
    kept = mask & (sample[:, None] != 0) & (np.arange(WIDTH) < lengths[:, None])
    return torch.from_numpy(ids[kept])


def mapping(scale: str) -> list[Row]:
    """Time and traffic of the mapping over four simulated ranks."""
    tp, positions = 4, POSITIONS[scale]
    logits = torch.randn(1, positions, VOCAB).to(torch.bfloat16)
    shards = [shard.contiguous() for shard in logits.chunk(tp, dim=-1)]
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:DRAFT].sort().values
    d2t = d2t_from_ids(ids)

    def ours(group: SimulatedGroup) -> Tensor:
        return map_teacher_logits_to_draft_vocab(shards[group.rank], d2t, None, group)

    def gathered(group: SimulatedGroup) -> Tensor:
        whole = torch.cat(group.all_gather(shards[group.rank]), dim=-1)
        return whole.index_select(-1, ids.chunk(tp)[group.rank])

    assert torch.equal(torch.cat(run_simulated(tp, ours), -1), logits[..., ids])
    mine, plain = best_each(
        [lambda: run_simulated(tp, ours), lambda: run_simulated(tp, gathered)], repeats=3
    )
    most = max(
        sum(len(p) for p in ColumnPlan.of(ids, V_local=VOCAB // tp, rank=r, size=tp).places)
        for r in range(tp)
    )
    size = f"{positions} x {VOCAB:,}, D {DRAFT:,}, TP {tp}"
    return [
        Row(
            name="mapping under TP, beside gathering the vocabulary",
            size=size,
            ours=mine,
            plain=plain,
            ratio=plain / mine,
            work=positions,
        ),
        Row(
            name="mapping under TP, columns to each rank",
            size=size,
            ours=float(most),
            plain=float(VOCAB),
            ratio=VOCAB / most,
            goal="<= D / TP",
            reached=most <= DRAFT // tp,
            unit="columns",
        ),
    ]


if __name__ == "__main__":
    main(rows, __doc__ or "")
