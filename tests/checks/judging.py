"""A world and a dump of it put before the checks, without files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.hypotheses import MaskWeights
from opdtool.checks.masks_verdict import Checked, DumpedMask, check_pack, diagnose_all
from opdtool.checks.recipes_values import Cells, as_numbers
from opdtool.core.geometry import PackGeometry
from opdtool.findings import Diagnosis
from tests.reference.faults import Dump, World


@dataclass
class MemoryBatch:
    """A batch in memory, read like one in a file."""

    tensors: dict[str, Tensor]
    lengths: Any
    width: int
    reads: int = field(default=0)

    def read(self, name: str, rows: Any = slice(None), columns: slice | None = None) -> Tensor:
        """Rows, and columns, of a tensor."""
        self.reads += 1
        if isinstance(rows, np.ndarray):
            rows = torch.from_numpy(rows)
        found = self.tensors[name][rows]
        return found if columns is None else found[:, columns]


def batch_of(world: World, dtype: torch.dtype = torch.float32) -> MemoryBatch:
    """The world's batch."""
    return MemoryBatch(
        tensors={
            "token_mask": torch.from_numpy(world.token_mask).to(dtype),
            "sample_mask": torch.from_numpy(world.sample_mask).to(dtype),
            "input_ids": torch.from_numpy(world.ids),
        },
        lengths=np.array(world.lengths, dtype=np.int64),
        width=world.width,
    )


def weights_of(batch: MemoryBatch) -> MaskWeights:
    """The batch's masks as the checks take them."""
    mask, sample = batch.tensors["token_mask"], batch.tensors["sample_mask"]
    dtype = torch.promote_types(mask.dtype, sample.dtype)
    return MaskWeights(
        tokens=Cells(batch=batch, name="token_mask", width=batch.width, decode=as_numbers),
        sample=sample.double().numpy(),
        given=sample,
        rounding=dtype if dtype.is_floating_point else None,
    )


def geometry_of(world: World) -> PackGeometry:
    """The geometry that gives the world's layout."""
    return PackGeometry(
        cp_size=world.cp,
        pad_multiple=world.multiple,
        pad_packed_to=world.total,
        tail="segment" if world.tail_segment else "absorb",
    )


@dataclass(frozen=True)
class Verdict:
    """What the checks made of a dump."""

    checked: Checked
    diagnosis: tuple[Diagnosis, ...]

    @property
    def failed(self) -> list[str]:
        """Codes of failed layout checks, and OPD301 where the values differ."""
        codes = [f.code for f in self.checked.outcome.findings if f.status == "fail"]
        pack = self.checked.pack
        if pack is None or pack.case.layout is None:
            return [*codes, "OPD302"]
        return codes + (["OPD301"] if pack.case.mismatches else [])

    @property
    def named(self) -> list[str]:
        """The diagnosed faults, pairs joined with a plus."""
        return ["+".join(entry.faults) or entry.fault for entry in self.diagnosis]


def judge(
    world: World,
    dump: Dump,
    *,
    vectors: bool = True,
    shift: int = 1,
    dtype: torch.dtype = torch.float32,
    batch: MemoryBatch | None = None,
    index: list[int] | None = None,
) -> Verdict:
    """Check a dump of the world as verify-mask does; without ``vectors`` by the geometry."""
    batch = batch or batch_of(world)
    shards = [torch.from_numpy(shard).to(dtype) for shard in dump.shards]

    def vector(values: list[int] | None) -> Tensor | None:
        return torch.tensor(values, dtype=torch.int32) if vectors and values else None

    geometry = geometry_of(world)
    if vectors:  # the geometry options say the multiples, not the total
        geometry = PackGeometry(cp_size=world.cp, pad_multiple=world.multiple)
    dumped = DumpedMask(
        name="pack",
        tensor="draft_token_mask",
        pieces=[lambda a, b, shard=shard: shard[a:b] for shard in shards],  # type: ignore[misc]
        sizes=[len(shard) for shard in shards],
        vectors={
            "cu_seqlens": vector(dump.cu),
            "cu_seqlens_padded": vector(dump.cu_padded),
            "sequence_index": None if index is None else torch.tensor(index),
        },
        whole=len(shards) == 1,
        shift=shift,
    )
    checked = check_pack(dumped, batch, weights_of(batch), geometry)
    return Verdict(checked, diagnose_all([checked], shift))
