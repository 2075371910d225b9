"""Invariants of splitting a batch into microbatches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdtool.core.binning import ALGORITHMS
from opdtool.core.errors import InputError
from opdtool.core.geometry import PackGeometry
from opdtool.core.plan import BinOptions, plan_packs, utilisation
from tests.reference import packing as slow


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    cp=st.sampled_from([1, 2, 4]),
    per_rank=st.sampled_from([1, 5, 16]),
    tail=st.sampled_from(["absorb", "segment"]),
    algorithm=st.sampled_from(ALGORITHMS),
    multiple=st.integers(1, 3),
    slots=st.integers(64, 300),
)
def test_microbatches_hold_every_row_once_and_none_exceeds_its_capacity(
    lengths: list[int],
    cp: int,
    per_rank: int,
    tail: str,
    algorithm: str,
    multiple: int,
    slots: int,
) -> None:
    geometry = PackGeometry(cp_size=cp, pad_packed_multiple=per_rank, tail=tail)  # type: ignore[arg-type]
    bins = BinOptions(max_tokens=slots, algorithm=algorithm, bins_multiple_of=multiple)
    array = np.array(lengths, dtype=np.int64)
    kept = [row for row, length in enumerate(lengths) if length]
    capacity = slots // geometry.total_multiple * geometry.total_multiple
    fits = all(slow.pad_length(n, geometry.sequence_multiple) <= capacity for n in lengths)
    if not kept or not fits or capacity == 0:
        with pytest.raises(InputError):
            plan_packs(array, geometry, bins, drop_empty=True)
        return
    fewest = BinOptions(max_tokens=slots, algorithm=algorithm)
    count = plan_packs(array, geometry, fewest, drop_empty=True).microbatches
    wanted = slow.pad_length(count, multiple)
    if wanted > len(kept):
        with pytest.raises(InputError, match=f"{wanted - len(kept)} sequence"):
            plan_packs(array, geometry, bins, drop_empty=True)
        return
    plan = plan_packs(array, geometry, bins, drop_empty=True)
    assert plan.microbatches == wanted
    rows = [row for m in range(plan.microbatches) for row in plan.rows(m).tolist()]
    assert sorted(rows) == kept
    assert plan.dropped.tolist() == [row for row, length in enumerate(lengths) if not length]
    figures = utilisation(plan)
    totals = [layout.total for layout in plan.layouts()]
    assert all(total <= slots and total % geometry.total_multiple == 0 for total in totals)
    assert list(figures.totals) == totals
    assert figures.slots == sum(totals)
    assert figures.real_tokens == sum(lengths)
    padded = [slow.pad_length(n, geometry.sequence_multiple) for n in lengths if n]
    assert figures.alignment_padding == sum(padded) - sum(lengths)
    assert figures.tail_padding == sum(totals) - sum(padded)
    assert figures.lower_bound == -(-sum(padded) // capacity) <= plan.microbatches


def test_a_refusal_names_eight_empty_rows_and_counts_the_rest() -> None:
    lengths = np.array([0] * 10 + [3], dtype=np.int64)
    with pytest.raises(InputError, match="rows 0, 1, 2, 3, 4, 5, 6, 7 and 2 more of length 0"):
        plan_packs(lengths, PackGeometry(), BinOptions())
