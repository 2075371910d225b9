"""Invariants of packing over random batches and geometries."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opdtool.core.geometry import PackGeometry
from opdtool.core.masks import draft_token_mask, pack_rolled_draft_token_mask
from opdtool.core.packing import gather_cp, pack, pack_positions, unpack
from tests.reference import packing as slow

lengths_lists = st.lists(st.integers(1, 23), min_size=1, max_size=7)
geometries = st.builds(
    lambda cp, tp, sp, times, fp8, tail, packed: PackGeometry(
        cp_size=cp,
        tp_size=tp,
        sequence_parallel=sp,
        pad_multiple=None
        if times is None
        else times * (2 * cp if cp > 1 else 1) * (tp if sp else 1),
        fp8=fp8,
        pad_packed_multiple=packed,
        tail=tail,
    ),
    cp=st.sampled_from([1, 2, 3, 4, 8]),
    tp=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
    times=st.none() | st.integers(1, 3),
    fp8=st.sampled_from(["none", "tensorwise"]),
    tail=st.sampled_from(["absorb", "segment"]),
    packed=st.sampled_from([1, 3]),
)


def a_batch(lengths: list[int], seed: int) -> torch.Tensor:
    """Random ids, never 0 on real tokens, 0 on padding."""
    width = max(lengths)
    ids = torch.randint(
        1, 1000, (len(lengths), width), generator=torch.Generator().manual_seed(seed)
    )
    return ids * (torch.arange(width) < torch.tensor(lengths)[:, None])


@settings(max_examples=150, deadline=None)
@given(lengths_lists, geometries, st.integers(0, 1000), st.integers(-3, 3))
def test_a_pack_equals_the_slow_reference_on_every_rank(
    lengths: list[int], geometry: PackGeometry, seed: int, shift: int
) -> None:
    layout, ids = geometry.layout(lengths), a_batch(lengths, seed)
    padded, tail = slow.padded_lengths(lengths, geometry.sequence_multiple, geometry.total_multiple)
    assert tail >= 0
    if geometry.tail == "absorb":
        padded[-1] += tail
    elif tail:
        padded, lengths = [*padded, tail], [*lengths, 0]
    cu, cu_padded = slow.cumulative(lengths), slow.cumulative(padded)
    assert layout.cu_seqlens.tolist() == cu
    assert layout.cu_seqlens_padded.tolist() == cu_padded
    for rank in range(layout.cp_size):
        want = slow.pack(ids.numpy(), cu, cu_padded, rank, layout.cp_size, shift)
        assert pack(ids, layout, cp_rank=rank, shift=shift).tolist() == want.tolist()
        where = slow.positions(cu_padded, rank, layout.cp_size)
        assert pack_positions(layout, cp_rank=rank).tolist() == where


@settings(max_examples=100, deadline=None)
@given(lengths_lists, geometries, st.integers(0, 1000))
def test_unpack_of_pack_is_the_identity_on_real_tokens(
    lengths: list[int], geometry: PackGeometry, seed: int
) -> None:
    ids = a_batch(lengths, seed)
    order = np.random.default_rng(seed).permutation(len(lengths))
    layout = geometry.layout([lengths[row] for row in order], sequence_index=order)
    shards = [pack(ids[order], layout, cp_rank=r) for r in range(layout.cp_size)]
    back = unpack(gather_cp(shards, layout), layout, rows=len(lengths), width=ids.shape[1])
    assert ids.any()
    assert torch.equal(back, ids)


@settings(max_examples=100, deadline=None)
@given(lengths_lists, geometries)
def test_every_real_token_is_owned_by_one_rank_and_slot(
    lengths: list[int], geometry: PackGeometry
) -> None:
    layout = geometry.layout(lengths)
    width = max(lengths)
    names = torch.arange(1, len(lengths) * width + 1).reshape(len(lengths), width)
    held = torch.cat([pack(names, layout, cp_rank=r) for r in range(layout.cp_size)])
    real = sorted(int(names[b, i]) for b, n in enumerate(lengths) for i in range(n))
    assert sorted(x for x in held.tolist() if x) == real


@settings(max_examples=100, deadline=None)
@given(lengths_lists, geometries, st.integers(0, 1000))
def test_gathered_shards_equal_the_pack_of_one_rank(
    lengths: list[int], geometry: PackGeometry, seed: int
) -> None:
    layout, ids = geometry.layout(lengths), a_batch(lengths, seed)
    shards = [pack(ids, layout, cp_rank=r, shift=-1) for r in range(layout.cp_size)]
    whole = pack(ids, layout.with_cp(1), shift=-1)
    assert torch.equal(gather_cp(shards, layout), whole)


@settings(max_examples=150, deadline=None)
@given(lengths_lists, geometries, st.integers(0, 1000))
def test_the_draft_mask_equals_the_slow_reference(
    lengths: list[int], geometry: PackGeometry, seed: int
) -> None:
    layout = geometry.layout(lengths)
    rng = np.random.default_rng(seed)
    token = rng.integers(0, 2, (len(lengths), max(lengths))).astype(np.float32)
    sample = rng.integers(0, 2, len(lengths)).astype(np.float32)
    cu, cu_padded = layout.cu_seqlens.tolist(), layout.cu_seqlens_padded.tolist()
    want = slow.draft_mask(token, sample, cu, cu_padded)
    token_t, sample_t = torch.from_numpy(token), torch.from_numpy(sample)
    got = pack_rolled_draft_token_mask(token_t, sample_t, tuple(cu), tuple(cu_padded))
    assert got[0].tolist() == want.tolist()
    weights = token_t * sample_t[:, None]
    shards = [draft_token_mask(weights, layout, cp_rank=r) for r in range(layout.cp_size)]
    assert gather_cp(shards, layout).tolist() == want.tolist()
