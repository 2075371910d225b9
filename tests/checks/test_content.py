"""verify-pack's checks and diagnosis against faulty packs made slowly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opdtool.checks.registry import faults
from tests.checks.pack_files import verify
from tests.checks.test_masks import unique_order
from tests.reference import faults as slow
from tests.reference.faults import World
from tests.reference.faults_packs import (
    PACK_FAULTS,
    Pack,
    filled_otherwise,
    random_pack_world,
    right,
)

CONTENT_ONLY = ("tail-not-clamped", "cu-seqlens-padded-twice")


def same(one: Pack, other: Pack) -> bool:
    """Whether two packs hold the same on every rank, offsets included."""
    return (one.cu, one.cu_padded) == (other.cu, other.cu_padded) and all(
        len(shards) == len(other.tensors[name])
        and all(
            a.shape == b.shape and bool((a == b).all())
            for a, b in zip(shards, other.tensors[name], strict=True)
        )
        for name, shards in one.tensors.items()
    )


def differs(world: World, pack: Pack) -> bool:
    """Whether a pack differs from the right one where tensors are compared: ids and positions
    on real tokens, targets where there is a next token or one of elsewhere, masks everywhere.
    """
    base = right(world)
    lengths = world.lengths + [0] * (len(world.padded) - world.rows)
    real, ahead = [], []
    for size, length in zip(world.padded, lengths, strict=True):
        real += [position < length for position in range(size)]
        ahead += [position + 1 < length for position in range(size)]
    real_shards = slow.cut(np.array(real), world.starts, world.cp)
    ahead_shards = slow.cut(np.array(ahead), world.starts, world.cp)
    segments = slow.cut(
        np.array([b for b, size in enumerate(world.padded) for _ in range(size)]),
        world.starts,
        world.cp,
    )
    for name, shards in pack.tensors.items():
        for rank, (good, found) in enumerate(zip(base.tensors[name], shards, strict=True)):
            if name == "draft_token_mask":
                where = np.ones(len(good), dtype=bool)
            else:
                where = (ahead_shards if name == "target_ids" else real_shards)[rank]
            if (good != found)[where].any():
                return True
            if name != "target_ids":
                continue
            for i in np.flatnonzero(~where):
                own = {
                    int(value)
                    for ids, held in zip(pack.tensors["input_ids"], segments, strict=True)
                    for value in ids[held == segments[rank][i]]
                }
                if int(found[i]) not in own | {0, -100}:
                    return True
    return False


def content_follows(world: World, pack: Pack) -> bool:
    """Whether more than one kind of token past the rows' lengths was packed as real."""
    base = right(world)
    extra = {
        int(value)
        for shard, good in zip(pack.tensors["input_ids"], base.tensors["input_ids"], strict=True)
        for value in shard[shard != good]
    }
    masks = zip(pack.tensors["draft_token_mask"], base.tensors["draft_token_mask"], strict=True)
    return len(extra) > 1 or any(bool((a != b).any()) for a, b in masks)


def expect_named(seeds: Iterable[int], folder: Path) -> None:
    injected: Counter[str] = Counter()
    detected: Counter[str] = Counter()
    named: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        world = random_pack_world(np.random.default_rng(seed))
        for name, make in PACK_FAULTS.items():
            if name == "rows-permuted" and not unique_order(world):
                continue
            for pack in make(world):
                if not differs(world, pack):
                    continue
                if name in CONTENT_ONLY and not content_follows(world, pack):
                    continue
                report = verify(world, pack, folder)
                injected[name] += 1
                detected[name] += not report.passed
                found = [entry.fault for entry in report.diagnosis]
                # A fault may make the same tensor, where it is compared, as earlier ones.
                exact = {entry.fault for entry in report.diagnosis if entry.match == "exact"}
                before = found[: found.index(name)] if name in found else found
                order = list(faults())
                good = name in exact and all(
                    other in exact and order.index(other) < order.index(name) for other in before
                )
                named[name] += good
                if not good:
                    wrong.append((seed, name, pack.note, found))
    print(f"{'fault':30} injected detected named")
    for name in PACK_FAULTS:
        print(f"{name:30} {injected[name]:8} {detected[name]:8} {named[name]:5}")
    assert all(injected[name] for name in PACK_FAULTS), injected
    assert detected == injected
    assert not wrong, wrong


def test_every_fault_of_a_pack_is_detected_and_named(tmp_path: Path) -> None:
    expect_named((3, 18), tmp_path)  # worlds in which every fault can be made


@pytest.mark.slow
def test_every_fault_of_a_pack_is_detected_and_named_in_many_worlds(tmp_path: Path) -> None:
    expect_named(range(100, 130), tmp_path)


def expect_no_alarm(worlds: int, start: int, folder: Path) -> None:
    filled = 0
    for seed in range(start, start + worlds):
        rng = np.random.default_rng(seed)
        world = random_pack_world(rng)
        other = filled_otherwise(world, rng)
        filled += not same(other, right(world))
        for pack in (right(world), other):
            report = verify(world, pack, folder)
            assert report.passed, (seed, [f for f in report.findings if f.status == "fail"])
            assert report.diagnosis == ()
    assert filled > worlds // 2


def test_right_packs_pass_however_their_padding_is_filled(tmp_path: Path) -> None:
    expect_no_alarm(12, 0, tmp_path)


@pytest.mark.slow
def test_many_right_packs_pass_however_their_padding_is_filled(tmp_path: Path) -> None:
    expect_no_alarm(500, 1000, tmp_path)


def test_a_wrong_token_is_located_and_not_diagnosed(tmp_path: Path) -> None:
    world = random_pack_world(np.random.default_rng(2))
    pack = right(world)
    shards = [shard.copy() for shard in pack.tensors["input_ids"]]
    held = [
        (b, position, start + position)
        for b, (start, size) in enumerate(zip(world.starts, world.padded, strict=False))
        for position in slow.windows(size, 0, world.cp)
    ]
    local = next(i for i, (b, p, _) in enumerate(held) if b == 1 and p < world.lengths[1])
    shards[0][local] += 1
    report = verify(world, replace(pack, tensors={**pack.tensors, "input_ids": shards}), tmp_path)
    finding = next(f for f in report.findings if f.code == "OPD201")
    row, position, slot = held[local]
    place = finding.first[0]
    assert finding.mismatches == 1
    assert (place["sequence"], place["position"], place["slot"]) == (row, position, slot)
    assert (place["cp_rank"], place["expected"]) == (0, int(world.ids[row, position]))
    assert report.diagnosis == ()


@pytest.mark.parametrize("takes", ["padded", "tail"])
def test_offsets_that_take_padding_in_only_warn_while_the_content_is_right(
    tmp_path: Path, takes: str
) -> None:
    seen = 0
    for seed in range(40):
        world = random_pack_world(np.random.default_rng(seed))
        if world.tail_segment or world.padded[-1] <= world.lengths[-1] or not world.tail:
            continue
        cu = world.starts if takes == "padded" else [*world.cu[:-1], world.cu[-1] + world.tail]
        report = verify(world, replace(right(world), cu=cu), tmp_path)
        finding = next(f for f in report.findings if f.code == "OPD108")
        assert report.passed
        assert finding.status == "warn"
        assert report.diagnosis == ()
        seen += 1
        if seen == 3:
            break
    assert seen == 3
