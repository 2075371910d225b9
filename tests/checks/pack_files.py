"""Packs of a reference world written as files, and verify-pack run on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from opdtool.findings import Report
from opdtool.jobs.geometry import GeometryOptions
from opdtool.jobs.verify_pack.run import VerifyPackJob, verify_pack
from opdtool.ranks.launch import open_ranks
from tests.reference.faults import World
from tests.reference.faults_packs import Pack


def write_batch(world: World, path: Path) -> Path:
    """The world's padded batch."""
    save_file(
        {
            "input_ids": torch.from_numpy(world.ids),
            "input_lengths": torch.tensor(world.lengths),
            "token_mask": torch.from_numpy(world.token_mask).float(),
            "sample_mask": torch.from_numpy(world.sample_mask).float(),
        },
        path,
    )
    return path


def write_pack(pack: Pack, folder: Path, stem: str = "pack") -> list[Path]:
    """One file a rank."""
    ranks = len(next(iter(pack.tensors.values())))
    paths = []
    for rank in range(ranks):
        tag = f".cp{rank}of{ranks}" if ranks > 1 else ""
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(shards[rank]))[None]
            for name, shards in pack.tensors.items()
        }
        tensors["draft_token_mask"] = tensors["draft_token_mask"].float()
        tensors["cu_seqlens"] = torch.tensor(pack.cu, dtype=torch.int32)
        tensors["cu_seqlens_padded"] = torch.tensor(pack.cu_padded, dtype=torch.int32)
        path = folder / f"{stem}{tag}.safetensors"
        save_file(tensors, path)
        paths.append(path)
    return paths


def verify(world: World, pack: Pack, folder: Path) -> Report:
    """verify-pack's report on a pack of the world."""
    batch = write_batch(world, folder / "batch.safetensors")
    job = VerifyPackJob(
        dump=write_pack(pack, folder),
        batch=[batch],
        geometry=GeometryOptions(cp=world.cp, pad_multiple=world.multiple),
    )
    with open_ranks("simulated") as ranks:
        return verify_pack(job, ranks)
