"""Faulty packs: token ids, targets and positions, made slowly from contract section 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tests.reference import faults as f
from tests.reference.faults import Array, Shards, World


@dataclass(frozen=True)
class Pack:
    """The tensors of a dumped pack, each as shards in rank order, and its offsets."""

    tensors: dict[str, Shards]
    cu: list[int]
    cu_padded: list[int]
    note: str = ""


def ids_pack(world: World) -> Array:
    """The whole pack's input_ids."""
    return f.lay(world, lambda row, column: int(world.ids[row, column]), dtype=np.int64)


def positions_pack(world: World) -> Array:
    """Positions from 0 in every segment."""
    return np.array([p for size in world.padded for p in range(size)], dtype=np.int64)


def wholes(world: World) -> dict[str, Array]:
    """The right pack before the cut."""
    ids = ids_pack(world)
    return {
        "input_ids": ids,
        "target_ids": f.roll_circular(ids, world.starts, 1),
        "position_ids": positions_pack(world),
        "draft_token_mask": f.right_pack(world),
    }


def cut_all(world: World, packs: dict[str, Array], note: str = "") -> Pack:
    """Every tensor cut into the right windows."""
    shards = {name: f.cut(pack, world.starts, world.cp) for name, pack in packs.items()}
    return Pack(shards, world.cu, world.starts, note)


def right(world: World) -> Pack:
    """The right pack."""
    return cut_all(world, wholes(world))


def filled_otherwise(world: World, rng: np.random.Generator) -> Pack:
    """A right pack whose padding other stacks would fill so."""
    packs = wholes(world)
    lengths = world.lengths + [0] * (len(world.padded) - world.rows)
    pad, ignore = int(rng.choice([0, 151_643])), int(rng.choice([0, -100, 1]))
    for start, size, length in zip(world.starts, world.padded, lengths, strict=False):
        for slot in range(start + length, start + size):
            packs["input_ids"][slot] = pad
            packs["position_ids"][slot] = 0
    if ignore == 1:  # rolled from padded ids
        packs["target_ids"] = f.roll_circular(packs["input_ids"], world.starts, 1)
    else:
        for start, size, length in zip(world.starts, world.padded, lengths, strict=False):
            for slot in range(start + max(length - 1, 0), start + size):
                packs["target_ids"][slot] = ignore
    return cut_all(world, packs)


def with_tensor(world: World, name: str, pack: Array, note: str = "") -> Pack:
    """The right pack but for one tensor."""
    return cut_all(world, {**wholes(world), name: pack}, note)


def targets_not_shifted(world: World) -> Iterator[Pack]:
    yield with_tensor(world, "target_ids", ids_pack(world))


def targets_shifted_right(world: World) -> Iterator[Pack]:
    yield with_tensor(world, "target_ids", f.roll(ids_pack(world), world.starts, -1))
    yield with_tensor(world, "target_ids", f.roll_circular(ids_pack(world), world.starts, -1))


def targets_shifted_twice(world: World) -> Iterator[Pack]:
    yield with_tensor(world, "target_ids", f.roll(ids_pack(world), world.starts, 2))
    yield with_tensor(world, "target_ids", f.roll_circular(ids_pack(world), world.starts, 2))


def targets_cross_boundary(world: World) -> Iterator[Pack]:
    yield with_tensor(world, "target_ids", f.roll_circular(ids_pack(world), [0, world.total], 1))


def targets_rolled_after_cp_cut(world: World) -> Iterator[Pack]:
    if world.cp == 1:
        return
    local = [start // world.cp for start in world.starts]
    base = right(world)
    for roll in (f.roll, f.roll_circular):
        shards = [roll(shard, local, 1) for shard in base.tensors["input_ids"]]
        yield replace(base, tensors={**base.tensors, "target_ids": shards})


def positions_not_restarted(world: World) -> Iterator[Pack]:
    yield with_tensor(world, "position_ids", np.arange(world.total), "over the pack")
    base, size = right(world), world.total // world.cp
    shards = [np.arange(size) for _ in range(world.cp)]
    yield replace(base, tensors={**base.tensors, "position_ids": shards}, note="on every rank")


def cp_contiguous(world: World) -> Iterator[Pack]:
    if world.cp == 1:
        return
    shards = {n: f.contiguous(p, world.starts, world.cp) for n, p in wholes(world).items()}
    yield Pack(shards, world.cu, world.starts)


def cp_rank_swapped(world: World) -> Iterator[Pack]:
    if world.cp == 1:
        return
    base = right(world)
    yield replace(base, tensors={n: s[1:] + s[:1] for n, s in base.tensors.items()})


def cp_split_whole_pack(world: World) -> Iterator[Pack]:
    if world.cp == 1:
        return
    ends = [0, world.total]
    packs = wholes(world)
    yield Pack({n: f.cut(p, ends, world.cp) for n, p in packs.items()}, world.cu, world.starts)
    pieces = {n: f.contiguous(p, ends, world.cp) for n, p in packs.items()}
    yield Pack(pieces, world.cu, world.starts)


def laid_out_unpadded(world: World) -> Iterator[Pack]:
    ids = np.zeros(world.total, dtype=np.int64)
    for b in range(world.rows):
        for position in range(world.lengths[b]):
            ids[world.cu[b] + position] = world.ids[b, position]
    targets = f.roll_circular(ids, [*world.cu, world.total], 1) if world.cu[-1] else ids
    mask = next(f.laid_out_unpadded(world)).shards
    pack = cut_all(world, {**wholes(world), "input_ids": ids, "target_ids": targets})
    yield replace(pack, tensors={**pack.tensors, "draft_token_mask": mask})


def rows_permuted(world: World) -> Iterator[Pack]:
    order = np.random.default_rng(0).permutation(world.rows).tolist()
    if order != sorted(order):
        own = f.permuted_world(world, order)
        yield replace(right(own), note=f"order {order}")


def left_padded_rows(world: World) -> Iterator[Pack]:
    ids = f.lay(
        world,
        lambda row, column: int(world.ids[row, column]),
        lead=lambda b: world.padded[b] - world.lengths[b],
        dtype=np.int64,
    )
    packs = {**wholes(world), "input_ids": ids}
    packs["target_ids"] = f.roll_circular(ids, world.starts, 1)
    pack = cut_all(world, packs)
    mask = next(f.left_padded_rows(world)).shards
    yield replace(pack, tensors={**pack.tensors, "draft_token_mask": mask})


def lengths_off_by_one(world: World) -> Iterator[Pack]:
    shorter = [length - 1 for length in world.lengths]
    own = replace(world, lengths=shorter)
    yield replace(right(own), cu=world.cu, note="L-1 in the right layout")


def tail_not_clamped(world: World) -> Iterator[Pack]:
    if world.tail:
        inflated = [*world.lengths[:-1], world.lengths[-1] + world.tail]
        own = replace(world, lengths=inflated)
        yield replace(right(own), cu=own.cu)


def cu_seqlens_padded_twice(world: World) -> Iterator[Pack]:
    lengths = [min(size, world.width) for size in world.padded[: world.rows]]
    yield replace(right(replace(world, lengths=lengths)), cu=world.starts)


PACK_FAULTS: dict[str, Callable[[World], Iterator[Pack]]] = {
    "laid-out-unpadded": laid_out_unpadded,
    "rows-permuted": rows_permuted,
    "left-padded-rows": left_padded_rows,
    "lengths-off-by-one": lengths_off_by_one,
    "tail-not-clamped": tail_not_clamped,
    "targets-rolled-after-cp-cut": targets_rolled_after_cp_cut,
    "cp-contiguous": cp_contiguous,
    "cp-rank-swapped": cp_rank_swapped,
    "cp-split-whole-pack": cp_split_whole_pack,
    "targets-not-shifted": targets_not_shifted,
    "targets-shifted-right": targets_shifted_right,
    "targets-shifted-twice": targets_shifted_twice,
    "targets-cross-boundary": targets_cross_boundary,
    "positions-not-restarted": positions_not_restarted,
    "cu-seqlens-padded-twice": cu_seqlens_padded_twice,
}
"""The faults that show in a pack's content, in the order of contract section 7."""


def random_pack_world(rng: np.random.Generator) -> World:
    """A random world whose batch holds tokens past each row's end (what was cut off)."""
    world = f.random_world(rng)
    ids = rng.integers(5, 50_000, size=world.ids.shape)
    return replace(world, ids=ids)
