"""Mask checks and their diagnosis against faults made slowly from the contract's words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from opdtool.checks.diagnose import LEAST_FOR_PAIR
from opdtool.checks.registry import faults
from tests.checks.judging import Verdict, batch_of, judge
from tests.reference import faults as slow
from tests.reference.faults import MASK_FAULTS, Dump, World

ORDER = list(MASK_FAULTS)
CONTENT_ONLY = ("tail-not-clamped", "cu-seqlens-padded-twice")
"""Faults whose offsets alone only warn: they are faults where the content follows."""


def same_shards(one: Dump, other: Dump) -> bool:
    """Whether two dumps hold the same values on every rank."""
    return len(one.shards) == len(other.shards) and all(
        a.shape == b.shape and bool((a == b).all())
        for a, b in zip(one.shards, other.shards, strict=True)
    )


def same(one: Dump, other: Dump, vectors: bool) -> bool:
    """Whether two dumps are the same, their offsets too where those are dumped."""
    offsets = one.cu == other.cu and one.cu_padded == other.cu_padded
    return same_shards(one, other) and (offsets or not vectors)


def unique_order(world: World) -> bool:
    """Whether no two rows could be exchanged unseen: their masks in their segments differ."""
    pack, starts = slow.right_pack(world), world.starts
    rows = {
        (tuple(pack[starts[b] : starts[b + 1]].tolist()), world.lengths[b])
        for b in range(world.rows)
    }
    told = {tuple(row).__hash__() for row in rows}
    trained = [
        tuple(w for w in pack[starts[b] : starts[b] + world.lengths[b]].tolist())
        for b in range(world.rows)
    ]
    stripped = {re.sub(r"(, 0\.0)+\)$", ")", str((1.0, *row))) for row in trained}
    return len(told) == world.rows and len(stripped) == world.rows


def injections(world: World, vectors: bool) -> Iterator[tuple[str, Dump]]:
    """Every fault that can be made in this world, each different from the right dump."""
    right = slow.right(world)
    for name, make in MASK_FAULTS.items():
        if name == "rows-permuted" and not unique_order(world):
            continue
        for dump in make(world):
            content = name in CONTENT_ONLY
            if same(dump, right, vectors) or (content and same_shards(dump, right)):
                continue
            yield name, dump


@dataclass
class Tally:
    """How often each fault was injected, detected, and named first (or found to be the same
    tensor as one that comes before it)."""

    injected: Counter[str] = field(default_factory=Counter)
    detected: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    earlier: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[object, ...]] = field(default_factory=list)

    def add(self, key: object, world: World, name: str, dump: Dump, vectors: bool) -> None:
        """Judge one injected fault."""
        assert not same(dump, slow.right(world), vectors)
        verdict = judge(world, dump, vectors=vectors)
        self.injected[name] += 1
        self.detected[name] += bool(verdict.failed)
        first = verdict.named[0] if verdict.named else ""
        if first == name:
            self.named[name] += 1
        elif name == "rows-permuted" and not vectors and not self._only_order(world, dump):
            self.injected[name] -= 1  # another order makes the same: it may not be named
            self.detected[name] -= 1
        elif is_earlier(world, first, name, dump, vectors) or makes_order(world, verdict, dump):
            self.earlier[name] += 1
        else:
            self.wrong.append((key, name, dump.note, vectors, verdict.named, verdict.failed))

    def _only_order(self, world: World, dump: Dump) -> bool:
        order = [int(i) for i in re.findall(r"\d+", dump.note)]
        orders = slow.orders_that_make(world, slow.right_pack(slow.permuted_world(world, order)))
        assert order in orders
        return len(orders) == 1

    def table(self) -> str:
        """The counts, one fault a line."""
        rows = [f"{'fault':30} injected detected   named same-as-earlier"]
        rows += [
            f"{name:30} {self.injected[name]:8} {self.detected[name]:8} {self.named[name]:7} "
            f"{self.earlier[name]:15}"
            for name in ORDER
        ]
        return "\n".join(rows)


def is_earlier(world: World, first: str, name: str, dump: Dump, vectors: bool) -> bool:
    """Whether the fault named first comes before the injected one and makes the same dump."""
    if first not in ORDER or ORDER.index(first) > ORDER.index(name):
        return False
    if first == "cp-rank-swapped":  # in any order of the ranks
        right = sorted(shard.tolist() for shard in slow.right(world).shards)
        return right == sorted(shard.tolist() for shard in dump.shards)
    last_alone = world.lengths[:-1] == world.padded[: len(world.lengths) - 1]
    if (first, name) == ("tail-not-clamped", "cu-seqlens-padded-twice") and last_alone:
        return True  # the last length with all padding is that vector
    return any(same(dump, other, vectors) for other in MASK_FAULTS[first](world))


def makes_order(world: World, verdict: Verdict, dump: Dump) -> bool:
    """Whether the rows in the order that was named first make the same masks."""
    if not verdict.named or verdict.named[0] != "rows-permuted":
        return False
    told = verdict.diagnosis[0].message.partition("hold rows ")[2]
    order = [int(i) for i in re.findall(r"\d+", told)]
    other = slow.right(slow.permuted_world(world, order))
    return order != sorted(order) and same_shards(dump, other)


def tally(worlds: int, start: int = 0) -> Tally:
    """Every fault in so many random worlds."""
    found = Tally()
    for seed in range(start, start + worlds):
        world = slow.random_world(np.random.default_rng(seed), weights=seed % 5 == 0)
        vectors = bool(seed % 2)
        for name, dump in injections(world, vectors):
            found.add(seed, world, name, dump, vectors)
    return found


def test_the_reference_and_the_registry_list_faults_in_the_same_order() -> None:
    order = [name for name in faults() if name in MASK_FAULTS]
    assert len(order) == len(MASK_FAULTS) > 20
    assert order == ORDER


def expect_all_named(found: Tally) -> None:
    print(found.table())
    assert all(found.injected[name] for name in ORDER), found.table()
    assert found.detected == found.injected, found.table()
    assert not found.wrong, f"{len(found.wrong)} of {found.injected.total()}: {found.wrong[:5]}"


def test_every_fault_is_detected_and_named_in_random_worlds() -> None:
    expect_all_named(tally(10))


@pytest.mark.slow
def test_every_fault_is_detected_and_named_in_many_random_worlds() -> None:
    expect_all_named(tally(250, start=1000))


def correct_dumps(count: int, start: int) -> Iterator[tuple[World, Verdict]]:
    """Right dumps of random worlds, with and without offsets, in several dtypes."""
    for seed in range(start, start + count):
        world = slow.random_world(np.random.default_rng(seed), weights=seed % 5 == 0)
        dtype = [torch.float32, torch.float64, torch.bfloat16, torch.bool][seed % 4]
        if seed % 5 == 0 and dtype == torch.bool:
            dtype = torch.float32
        yield world, judge(world, slow.right(world), vectors=bool(seed % 2), dtype=dtype)


def expect_no_alarm(count: int, start: int) -> None:
    trained = 0
    for world, verdict in correct_dumps(count, start):
        trained += int(slow.right_pack(world).sum())
        assert verdict.failed == [], world
        assert verdict.diagnosis == (), world
    assert trained > count


def test_correct_dumps_give_no_alarm() -> None:
    expect_no_alarm(100, start=0)


@pytest.mark.slow
def test_ten_thousand_correct_dumps_give_no_alarm() -> None:
    expect_no_alarm(10_000, start=10_000)


def flipped(world: World, rng: np.random.Generator) -> tuple[Dump, int, int]:
    """The right dump with one slot flipped: (dump, rank, local slot)."""
    shards = [shard.copy() for shard in slow.right(world).shards]
    rank = int(rng.integers(len(shards)))
    local = int(rng.integers(len(shards[rank])))
    shards[rank][local] = 1.0 - shards[rank][local]
    return Dump(shards, world.cu, world.starts), rank, local


def test_a_random_flip_is_at_its_exact_place_and_no_fault_that_does_not_make_it_is_named() -> None:
    undiagnosed = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        world = slow.random_world(rng)
        dump, rank, local = flipped(world, rng)
        verdict = judge(world, dump, vectors=bool(seed % 2))
        assert verdict.checked.pack is not None
        case, scan = verdict.checked.pack.case, verdict.checked.pack.scan
        assert case.mismatches == 1
        assert case.layout is not None
        slot, expected, actual = scan.values.first[0]
        place = case.layout.locate(slot)
        assert (place["cp_rank"], expected) == (rank, slow.right(world).shards[rank][local])
        assert actual == 1.0 - expected
        held = [
            start + position
            for start, size in zip(world.starts, world.padded, strict=False)
            for position in slow.windows(size, rank, world.cp)
        ]
        assert held[local] == slot
        undiagnosed += not verdict.named
        for name in verdict.named:  # a batch this small may make a flip that is a fault
            assert any(same_shards(dump, other) for other in MASK_FAULTS[name](world)), (
                seed,
                name,
            )
    assert undiagnosed > 30


PAIRS = {
    "mask-not-shifted+sample-mask-ignored": lambda world: slow.dump(
        world, slow.lay(world, lambda row, column: float(world.token_mask[row, column]))
    ),
    "mask-not-shifted+cp-contiguous": lambda world: Dump(
        slow.contiguous(slow.unrolled(world), world.starts, world.cp), world.cu, world.starts
    ),
    "sample-mask-ignored+prompt-not-masked": lambda world: slow.dump(
        world, slow.roll(slow.lay(world, lambda row, column: 1.0), world.starts)
    ),
    "mask-leaks-across-boundary+cp-contiguous": lambda world: Dump(
        slow.contiguous(
            slow.roll_circular(slow.unrolled(world), [0, world.total]), world.starts, world.cp
        ),
        world.cu,
        world.starts,
    ),
    "mask-not-shifted+left-padded-rows": lambda world: slow.dump(
        world,
        slow.lay(
            world,
            lambda row, column: slow.weight(world, row, column),
            lead=lambda b: world.padded[b] - world.lengths[b],
        ),
    ),
    "sample-mask-ignored+mask-covers-padding": lambda world: next(
        slow.mask_covers_padding(replace(world, sample_mask=np.ones(world.rows)))
    ),
    "mask-not-shifted+mask-covers-padding": lambda world: slow.dump(
        world,
        np.maximum(
            slow.unrolled(world),
            np.array(
                [
                    float(slot - world.starts[b] >= [*world.lengths, 0][b])
                    for b in range(len(world.padded))
                    for slot in range(world.starts[b], world.starts[b + 1])
                ]
            ),
        ),
    ),
    "mask-not-shifted+cp-rank-swapped": lambda world: Dump(
        slow.cut(slow.unrolled(world), world.starts, world.cp)[::-1], world.cu, world.starts
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_faults_at_once_are_found_as_a_pair(pair: str) -> None:
    found = made = 0
    for seed in range(60):
        world = slow.random_world(np.random.default_rng(seed))
        if ("cp-" in pair and world.cp == 1) or made == 3:
            continue
        dump = PAIRS[pair](world)
        single = [
            other
            for name in ORDER
            for other in MASK_FAULTS[name](world)
            if same_shards(dump, other)
        ]
        if same_shards(dump, slow.right(world)) or single:
            continue
        verdict = judge(world, dump, vectors=bool(seed % 2))
        assert verdict.failed
        assert verdict.checked.pack is not None
        if verdict.checked.pack.case.mismatches < LEAST_FOR_PAIR:
            continue
        made += 1
        found += pair in verdict.named
        assert all("+" in name for name in verdict.named), (seed, verdict.named)
    assert made == 3
    assert found == made


def test_a_dump_that_is_nearly_a_fault_is_likely_with_its_score() -> None:
    rng = np.random.default_rng(3)
    world = big_world(rng)
    pack = slow.unrolled(world)
    wrong = np.flatnonzero(pack != slow.right_pack(world))
    assert len(wrong) > 400
    pack[wrong[7]] = 5.0
    verdict = judge(world, slow.dump(world, pack))
    assert verdict.named == ["mask-not-shifted"]
    assert verdict.diagnosis[0].match == "likely"
    assert verdict.diagnosis[0].score == pytest.approx(1 - 1 / len(wrong))


def test_a_fault_that_adds_a_mismatch_is_not_likely() -> None:
    world = big_world(np.random.default_rng(4))
    pack, right = slow.unrolled(world), slow.right_pack(world)
    differ = np.flatnonzero(pack != right)
    pack[differ[11]] = right[differ[11]]
    assert judge(world, slow.dump(world, pack)).named == []


def big_world(rng: np.random.Generator) -> World:
    """A batch with thousands of slots."""
    lengths = rng.integers(100, 200, size=20)
    mask = (rng.random((20, 200)) < 0.5).astype(np.float64)
    return World(
        lengths=lengths.tolist(),
        width=200,
        token_mask=mask,
        sample_mask=np.ones(20),
        padded=[int(-(-length // 4) * 4) for length in lengths],
        cp=2,
        multiple=4,
    )


@pytest.mark.parametrize("by", [2, 3])
def test_a_mask_shifted_by_more_is_right_when_that_was_asked_for(by: int) -> None:
    for seed in range(4):
        world = slow.random_world(np.random.default_rng(seed))
        dump = slow.right(world, shift=by)
        if same_shards(dump, slow.right(world)):
            continue
        assert judge(world, dump, shift=by).failed == []
        assert judge(world, dump, shift=1).failed == ["OPD301"]


def test_unshifted_masks_are_right_under_their_convention_and_shifted_ones_named() -> None:
    named = 0
    for seed in range(30):
        world = slow.random_world(np.random.default_rng(seed))
        right = slow.dump(world, slow.unrolled(world))
        assert judge(world, right, shift=0).failed == []
        assert judge(world, right, shift=0).diagnosis == ()
        dump = slow.right(world)
        if not same_shards(dump, right):
            verdict = judge(world, dump, shift=0)
            assert verdict.failed
            named += verdict.named[0] == "mask-shifted"
    assert named >= 20


def test_an_order_of_rows_and_of_ranks_is_told() -> None:
    told = 0
    for seed in range(40):
        world = slow.random_world(np.random.default_rng(seed))
        if world.cp < 4 or not unique_order(world):
            continue
        rng = np.random.default_rng(seed)
        for dump in slow.rows_permuted(world, rng):
            verdict = judge(world, dump, vectors=bool(seed % 2))
            order = dump.note.removeprefix("order [").removesuffix("]")
            assert order in verdict.diagnosis[0].message
            told += 1
        for dump in slow.cp_rank_swapped(world, rng):
            order = dump.note.removeprefix("order [").removesuffix("]")
            verdict = judge(world, dump)
            ranks = next(e for e in verdict.diagnosis if e.fault == "cp-rank-swapped")
            assert "ranks" in ranks.message
            told += order in ranks.message
    assert told >= 6


def test_rules_of_their_own_are_counted_in_a_bad_mask() -> None:
    world = World(
        lengths=[4, 3],
        width=4,
        token_mask=np.array([[0, 1, 1, 1], [0, 1, 1, 0]], dtype=np.float64),
        sample_mask=np.array([1.0, 0.0]),
        padded=[6, 4],
    )
    right = slow.right_pack(world)
    assert right.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    bad = right.copy()
    bad[3] = 1.0  # the last real slot of row 0
    bad[5] = 2.0  # padding, and no value of the batch
    bad[6] = 1.0  # a dropped row
    bad[9] = np.nan  # padding
    verdict = judge(world, slow.dump(world, bad))
    assert verdict.checked.pack is not None
    scan = verdict.checked.pack.scan
    assert [(p[0], p[2]) for p in scan.last.first] == [(3, 1.0)]
    assert [p[0] for p in scan.padding.first] == [5, 9]
    assert [p[0] for p in scan.dropped.first] == [6]
    assert [p[0] for p in scan.finite.first] == [9]
    assert [(p[0], p[2]) for p in scan.range.first] == [(5, 2.0)]
    assert scan.values.count == 4


def test_the_batch_is_read_once_when_the_mask_is_right() -> None:
    world = big_world(np.random.default_rng(0))
    batch = batch_of(world)
    verdict = judge(world, slow.right(world), batch=batch)
    assert verdict.failed == []
    assert batch.reads == 1
