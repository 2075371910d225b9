"""Every known fault of packs and masks, made slowly from the words of contract section 7.

Loops over rows and slots, one at a time, and nothing of opdtool. A :class:`World` is a batch
with a layout; a fault returns the shards that a broken framework would have dumped, and the
cumulative lengths that it would have dumped beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shards = list[Array]


@dataclass(frozen=True)
class World:
    """A batch and the right layout of its pack: ``padded`` slots a segment, tail included."""

    lengths: list[int]
    width: int
    token_mask: Array
    sample_mask: Array
    padded: list[int]
    cp: int = 1
    multiple: int = 1
    tail_segment: bool = False
    ids: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))

    @property
    def starts(self) -> list[int]:
        """The first slot of each segment, and the end."""
        return [sum(self.padded[:i]) for i in range(len(self.padded) + 1)]

    @property
    def cu(self) -> list[int]:
        """Cumulative real lengths, a tail segment's too."""
        lengths = self.lengths + [0] * (len(self.padded) - len(self.lengths))
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    @property
    def total(self) -> int:
        """T."""
        return sum(self.padded)

    @property
    def rows(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def tail(self) -> int:
        """Slots of the last segment past its alignment: an absorbed tail."""
        if self.tail_segment or not self.lengths:
            return 0
        aligned = -(-self.lengths[-1] // self.multiple) * self.multiple
        return self.padded[-1] - aligned


@dataclass(frozen=True)
class Dump:
    """What a framework dumped: shards in rank order and its offsets (None: none dumped)."""

    shards: Shards
    cu: list[int] | None = None
    cu_padded: list[int] | None = None
    note: str = ""


def weight(world: World, row: int, column: int) -> float:
    """The weight of one token."""
    return float(world.token_mask[row, column]) * float(world.sample_mask[row])


def lay(
    world: World,
    value: Callable[[int, int], float],
    *,
    lengths: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    lead: Callable[[int], int] | None = None,
    dtype: Any = np.float64,
) -> Array:
    """The unrolled pack: row b's tokens from its segment's first slot on."""
    pack = np.zeros(world.total, dtype=dtype)
    for b in range(world.rows):
        row = order[b] if order is not None else b
        length = (lengths if lengths is not None else world.lengths)[row]
        for position in range(min(length, world.width)):
            slot = position + (lead(b) if lead is not None else 0)
            if slot < world.padded[b]:
                pack[world.starts[b] + slot] = value(row, position)
    return pack


def roll(pack: Array, starts: Sequence[int], by: int = 1) -> Array:
    """Slot t takes slot t + by of its own segment; what lies outside it is zero."""
    out = np.zeros_like(pack)
    for start, stop in pairwise(starts):
        for slot in range(start, stop):
            if start <= slot + by < stop:
                out[slot] = pack[slot + by]
    return out


def roll_circular(pack: Array, starts: Sequence[int], by: int = 1) -> Array:
    """Slot t takes slot t + by of its own segment, round and round."""
    out = np.zeros_like(pack)
    for start, stop in pairwise(starts):
        for slot in range(start, stop):
            out[slot] = pack[start + (slot - start + by) % (stop - start)]
    return out


def windows(length: int, rank: int, cp: int) -> list[int]:
    """The positions of a segment that one rank holds: chunk r and chunk 2 CP - 1 - r."""
    if cp == 1:
        return list(range(length))
    chunk = length // (2 * cp)
    assert chunk * 2 * cp == length
    last = 2 * cp - 1 - rank
    return [rank * chunk + i for i in range(chunk)] + [last * chunk + i for i in range(chunk)]


def cut(pack: Array, starts: Sequence[int], cp: int) -> Shards:
    """Each rank's zig-zag windows of every segment."""
    shards = []
    for rank in range(cp):
        held = [
            pack[start + position]
            for start, stop in pairwise(starts)
            for position in windows(stop - start, rank, cp)
        ]
        shards.append(np.array(held, dtype=pack.dtype))
    return shards


def unrolled(world: World) -> Array:
    """The packed mask before any shift."""
    return lay(world, lambda row, column: weight(world, row, column))


def right_pack(world: World, shift: int = 1) -> Array:
    """The expected mask of the whole pack."""
    return roll(unrolled(world), world.starts, shift)


def right(world: World, shift: int = 1) -> Dump:
    """The expected dump."""
    return dump(world, right_pack(world, shift))


def dump(world: World, pack: Array, note: str = "") -> Dump:
    """A whole pack cut into the right windows, with the right offsets."""
    return Dump(cut(pack, world.starts, world.cp), world.cu, world.starts, note)


def real_and_kept(world: World) -> Iterator[tuple[int, int, int]]:
    """(row, first slot, length) of every kept row."""
    for b in range(world.rows):
        if world.sample_mask[b] != 0:
            yield b, world.starts[b], world.lengths[b]


# ---- faults of the mask's values and shift -------------------------------------------------


def mask_not_shifted(world: World) -> Iterator[Dump]:
    yield dump(world, unrolled(world))


def mask_shifted_right(world: World) -> Iterator[Dump]:
    yield dump(world, roll(unrolled(world), world.starts, -1))


def mask_shifted_twice(world: World) -> Iterator[Dump]:
    yield dump(world, roll(unrolled(world), world.starts, 2))


def mask_leaks_across_boundary(world: World) -> Iterator[Dump]:
    yield dump(world, roll_circular(unrolled(world), [0, world.total], 1))


def mask_wraps_within_segment(world: World) -> Iterator[Dump]:
    yield dump(world, roll_circular(unrolled(world), world.starts, 1))


def mask_last_slot_kept(world: World) -> Iterator[Dump]:
    pack = right_pack(world)
    for _, start, length in real_and_kept(world):
        if length:
            pack[start + length - 1] = 1.0
    yield dump(world, pack)


def sample_mask_ignored(world: World) -> Iterator[Dump]:
    pack = lay(world, lambda row, column: float(world.token_mask[row, column]))
    yield dump(world, roll(pack, world.starts))


def prompt_not_masked(world: World) -> Iterator[Dump]:
    pack = lay(world, lambda row, column: float(world.sample_mask[row]))
    yield dump(world, roll(pack, world.starts))


def mask_covers_padding(world: World) -> Iterator[Dump]:
    pack = right_pack(world)
    lengths = world.lengths + [0] * (len(world.padded) - world.rows)
    for b, length in enumerate(lengths):
        for slot in range(world.starts[b] + length, world.starts[b + 1]):
            pack[slot] = 1.0
    yield dump(world, pack)


def mask_inverted(world: World) -> Iterator[Dump]:
    yield dump(world, 1.0 - right_pack(world), "one minus the right mask")
    inverse = replace(world, token_mask=1.0 - world.token_mask)
    yield dump(world, right_pack(inverse), "the right mask of one minus token_mask")


# ---- faults of where rows lie ---------------------------------------------------------------


def laid_out_unpadded(world: World) -> Iterator[Dump]:
    pack = np.zeros(world.total)
    for b in range(world.rows):
        for position in range(world.lengths[b]):
            pack[world.cu[b] + position] = weight(world, b, position)
    pack = roll(pack, [*world.cu, world.total])
    yield dump(world, pack)


def rows_permuted(world: World, rng: np.random.Generator | None = None) -> Iterator[Dump]:
    """Segments in another order, laid out by the lengths of the rows that they hold."""
    rng = rng or np.random.default_rng(0)
    order = rng.permutation(world.rows).tolist()
    if order == sorted(order):
        return
    own = permuted_world(world, order)
    yield dump(own, right_pack(own), f"order {order}")


def permuted_world(world: World, order: Sequence[int]) -> World:
    """The same rows as a batch in another order, with a layout of its own."""
    padded = [world.padded[i] for i in order] + world.padded[world.rows :]
    if not world.tail_segment and world.tail:
        aligned = [-(-world.lengths[i] // world.multiple) * world.multiple for i in order]
        padded = [*aligned[:-1], aligned[-1] + world.tail]
    return replace(
        world,
        lengths=[world.lengths[i] for i in order],
        token_mask=world.token_mask[list(order)],
        sample_mask=world.sample_mask[list(order)],
        ids=world.ids[list(order)] if len(world.ids) else world.ids,
        padded=padded,
    )


def orders_that_make(world: World, pack: Array) -> list[list[int]]:
    """Every order of the rows, each in its own room, whose right mask is this whole pack."""
    room = [-(-length // world.multiple) * world.multiple for length in world.lengths]
    found: list[list[int]] = []

    def go(chosen: list[int], at: int) -> None:
        if len(chosen) == world.rows:
            if not pack[at:].any():
                found.append(chosen)
            return
        for row in range(world.rows):
            values = [weight(world, row, column) for column in range(1, world.lengths[row])]
            segment = np.array(values + [0.0] * (room[row] - len(values)))
            here = pack[at : at + room[row]]
            if row not in chosen and len(here) == room[row] and (here == segment).all():
                go([*chosen, row], at + room[row])

    go([], 0)
    return found


def left_padded_rows(world: World) -> Iterator[Dump]:
    pack = lay(
        world,
        lambda row, column: weight(world, row, column),
        lead=lambda b: world.padded[b] - world.lengths[b],
    )
    yield dump(world, roll(pack, world.starts), "in the segment")
    pack = np.zeros(world.total)
    for b in range(world.rows):
        aligned = [0.0] * world.width
        for column in range(world.lengths[b]):
            aligned[world.width - world.lengths[b] + column] = weight(world, b, column)
        for position in range(world.lengths[b]):
            pack[world.starts[b] + position] = aligned[position]
    yield dump(world, roll(pack, world.starts), "in the batch")


def lengths_off_by_one(world: World) -> Iterator[Dump]:
    shorter = [length - 1 for length in world.lengths]
    pack = lay(world, lambda row, column: weight(world, row, column), lengths=shorter)
    yield dump(world, roll(pack, world.starts), "L-1 in the right layout")
    own = with_lengths(world, shorter)
    yield dump(own, right_pack(own), "L-1 in their own layout")
    longer = [length + 1 for length in world.lengths]
    cu = [sum(longer[:i]) for i in range(len(longer) + 1)]
    cu += [cu[-1]] * (len(world.padded) - world.rows)
    yield replace(right(world), cu=cu, note="L+1 in cu_seqlens alone")


def with_lengths(world: World, lengths: list[int]) -> World:
    """The batch with other lengths in a layout of its own, without a tail."""
    padded = [-(-length // world.multiple) * world.multiple for length in lengths]
    return replace(world, lengths=lengths, padded=padded, tail_segment=False)


def tail_not_clamped(world: World) -> Iterator[Dump]:
    """The last sequence runs on through the absorbed tail."""
    if not world.tail:
        return
    last = world.rows - 1
    inflated = [*world.lengths[:-1], world.lengths[-1] + world.tail]
    cu = [sum(inflated[:i]) for i in range(len(inflated) + 1)]
    pack = lay(world, lambda row, column: weight(world, row, column), lengths=inflated)
    yield replace(dump(world, roll(pack, world.starts), "columns past the row copied"), cu=cu)
    whole = [*world.lengths[:-1], world.padded[-1]]
    pack = lay(world, lambda row, column: weight(world, row, column), lengths=whole)
    yield dump(world, roll(pack, world.starts), "columns past the row copied to the end")
    if world.sample_mask[last] == 0:
        return
    pack = right_pack(world)
    for slot in range(world.total - world.tail, world.total):
        pack[slot] = 1.0
    yield dump(world, pack, "the tail's slots are one")


# ---- faults of shift under another convention, and of context parallelism --------------------


def mask_shifted(world: World) -> Iterator[Dump]:
    """For the unshifted convention."""
    yield dump(world, right_pack(world))


def mask_rolled_after_cp_cut(world: World) -> Iterator[Dump]:
    if world.cp == 1:
        return
    local = [start // world.cp for start in world.starts]
    shards = [roll(shard, local) for shard in cut(unrolled(world), world.starts, world.cp)]
    yield Dump(shards, world.cu, world.starts)


def contiguous(pack: Array, starts: Sequence[int], cp: int) -> Shards:
    """Rank r holds the r-th of CP equal pieces of each segment."""
    shards = []
    for rank in range(cp):
        parts = []
        for start, stop in pairwise(starts):
            piece = (stop - start) // cp
            parts.append(pack[start + rank * piece : start + (rank + 1) * piece])
        shards.append(np.concatenate(parts))
    return shards


def cp_contiguous(world: World) -> Iterator[Dump]:
    if world.cp > 1:
        yield Dump(contiguous(right_pack(world), world.starts, world.cp), world.cu, world.starts)


def cp_rank_swapped(world: World, rng: np.random.Generator | None = None) -> Iterator[Dump]:
    if world.cp == 1:
        return
    rng = rng or np.random.default_rng(1)
    order = rng.permutation(world.cp).tolist()
    if order == sorted(order):
        order = order[1:] + order[:1]
    shards = right(world).shards
    yield Dump([shards[i] for i in order], world.cu, world.starts, f"order {order}")


def cp_split_whole_pack(world: World) -> Iterator[Dump]:
    if world.cp == 1:
        return
    pack, ends = right_pack(world), [0, world.total]
    yield Dump(cut(pack, ends, world.cp), world.cu, world.starts, "windows")
    yield Dump(contiguous(pack, ends, world.cp), world.cu, world.starts, "contiguous pieces")


# ---- faults of the offsets -------------------------------------------------------------------


def cu_seqlens_swapped(world: World) -> Iterator[Dump]:
    yield replace(right(world), cu=world.starts, cu_padded=world.cu)


def cu_seqlens_padded_twice(world: World) -> Iterator[Dump]:
    """The content holds min(padded, S) tokens of each row."""
    pack = lay(world, lambda row, column: weight(world, row, column), lengths=world.padded)
    yield replace(dump(world, roll(pack, world.starts)), cu=world.starts)


def cu_seqlens_divided_by_cp(world: World) -> Iterator[Dump]:
    if world.cp == 1:
        return
    yield replace(
        right(world),
        cu=[value // world.cp for value in world.cu],
        cu_padded=[value // world.cp for value in world.starts],
    )


def cu_seqlens_not_monotone(world: World) -> Iterator[Dump]:
    if len(world.padded) < 3:
        return
    broken = list(world.starts)
    broken[1], broken[2] = broken[2], broken[1]
    if broken != sorted(broken):
        yield replace(right(world), cu_padded=broken)


def cu_seqlens_wrong_end(world: World) -> Iterator[Dump]:
    unit = world.multiple
    yield replace(right(world), cu_padded=[*world.starts[:-1], world.total + unit], note="longer")


def padding_multiple_wrong(world: World) -> Iterator[Dump]:
    """Segments padded to half the multiple that the geometry asks for."""
    half, factor = world.multiple // 2, 2 * world.cp if world.cp > 1 else 1
    if world.multiple % 2 or half % factor or world.tail_segment or world.tail:
        return
    padded = [-(-length // half) * half for length in world.lengths]
    if all(size % world.multiple == 0 for size in padded):
        return
    own = replace(world, padded=padded)
    yield dump(own, right_pack(own))


MASK_FAULTS: dict[str, Callable[[World], Iterator[Dump]]] = {
    "mask-not-shifted": mask_not_shifted,
    "mask-shifted-right": mask_shifted_right,
    "mask-shifted-twice": mask_shifted_twice,
    "mask-leaks-across-boundary": mask_leaks_across_boundary,
    "mask-wraps-within-segment": mask_wraps_within_segment,
    "mask-last-slot-kept": mask_last_slot_kept,
    "sample-mask-ignored": sample_mask_ignored,
    "prompt-not-masked": prompt_not_masked,
    "mask-covers-padding": mask_covers_padding,
    "mask-inverted": mask_inverted,
    "laid-out-unpadded": laid_out_unpadded,
    "rows-permuted": rows_permuted,
    "left-padded-rows": left_padded_rows,
    "lengths-off-by-one": lengths_off_by_one,
    "tail-not-clamped": tail_not_clamped,
    "mask-rolled-after-cp-cut": mask_rolled_after_cp_cut,
    "cp-contiguous": cp_contiguous,
    "cp-rank-swapped": cp_rank_swapped,
    "cp-split-whole-pack": cp_split_whole_pack,
    "cu-seqlens-swapped": cu_seqlens_swapped,
    "cu-seqlens-padded-twice": cu_seqlens_padded_twice,
    "cu-seqlens-divided-by-cp": cu_seqlens_divided_by_cp,
    "cu-seqlens-not-monotone": cu_seqlens_not_monotone,
    "cu-seqlens-wrong-end": cu_seqlens_wrong_end,
    "padding-multiple-wrong": padding_multiple_wrong,
}
"""The faults that show in a rolled mask and its offsets, in the order of contract section 7."""


def random_world(rng: np.random.Generator, *, weights: bool = False) -> World:
    """A small batch with everything that makes masks go wrong: first tokens trained, rows of
    one and two tokens, dropped rows, absorbed tails and tail segments, weights past a row's
    end, CP up to 8."""
    cp = int(rng.choice([1, 2, 4, 8]))
    factor = 2 * cp if cp > 1 else 1
    multiple = factor * int(rng.choice([1, 2, 4]))
    rows, width = int(rng.integers(2, 9)), int(rng.integers(6, 40))
    lengths = rng.integers(1, width + 1, size=rows)
    for special in (1, 2):
        if rng.random() < 0.3:
            lengths[rng.integers(rows)] = special
    token_mask = (rng.random((rows, width)) < rng.choice([0.3, 0.6, 0.9])).astype(np.float64)
    for b in range(rows):
        if rng.random() < 0.5:  # a prompt, then an answer to the end
            token_mask[b] = np.arange(width) >= rng.integers(0, max(1, int(lengths[b])))
        if rng.random() < 0.4:
            token_mask[b, 0] = 1.0
        if rng.random() < 0.5:
            token_mask[b, lengths[b] :] = 0.0
    if weights:
        token_mask *= rng.choice([0.25, 0.5, 1.0, 2.0], size=token_mask.shape)
    sample_mask = (rng.random(rows) < 0.8).astype(np.float64)
    padded = [int(-(-length // multiple) * multiple) for length in lengths]
    kind = rng.choice(["none", "absorb", "segment"])
    tail = multiple * int(rng.integers(1, 4)) if kind != "none" else 0
    if kind == "absorb":
        padded[-1] += tail
    elif kind == "segment":
        padded.append(tail)
    ids = rng.integers(5, 50_000, size=(rows, width))
    for b in range(rows):
        ids[b, lengths[b] :] = 0
    return World(
        lengths=[int(length) for length in lengths],
        width=width,
        token_mask=token_mask,
        sample_mask=sample_mask,
        padded=padded,
        cp=cp,
        multiple=multiple,
        tail_segment=kind == "segment",
        ids=ids,
    )
