"""Checks of cumulative lengths, case by case, and the order of the registry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.checks.layout import check_layout
from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.checks.registry import checks, faults
from opdtool.core.geometry import PackGeometry

# Three rows of 3, 5 and 2 tokens, padded to multiples of 4: a b c . | d e f g h . . . | i j . .
LENGTHS = [3, 5, 2]
REAL = [0, 3, 8, 10]
PADDED = [0, 4, 12, 16]
CONTRACT_ORDER = [
    "mask-not-shifted",
    "mask-shifted-right",
    "mask-shifted-twice",
    "mask-leaks-across-boundary",
    "mask-wraps-within-segment",
    "mask-last-slot-kept",
    "sample-mask-ignored",
    "prompt-not-masked",
    "mask-covers-padding",
    "mask-inverted",
    "laid-out-unpadded",
    "rows-permuted",
    "left-padded-rows",
    "lengths-off-by-one",
    "tail-not-clamped",
    "mask-shifted",
    "mask-rolled-after-cp-cut",
    "targets-rolled-after-cp-cut",
    "cp-contiguous",
    "cp-rank-swapped",
    "cp-split-whole-pack",
    "targets-not-shifted",
    "targets-shifted-right",
    "targets-shifted-twice",
    "targets-cross-boundary",
    "positions-not-restarted",
    "cu-seqlens-swapped",
    "cu-seqlens-padded-twice",
    "cu-seqlens-divided-by-cp",
    "cu-seqlens-not-monotone",
    "cu-seqlens-wrong-end",
    "padding-multiple-wrong",
]


def vector(values: Any, dtype: torch.dtype = torch.int32) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=dtype)


def judged(real: Any = REAL, padded: Any = PADDED, **more: Any) -> LayoutOutcome:
    dtype = more.get("dtype", torch.int32)
    index = more.get("index")
    return check_layout(
        PackVectors(
            cu_seqlens=vector(real, dtype),
            cu_seqlens_padded=vector(padded, dtype),
            sequence_index=None if index is None else torch.tensor(index),
            lengths=np.array(more.get("lengths", LENGTHS), dtype=np.int64),
            geometry=more.get("geometry", PackGeometry(cp_size=2)),
            slots=more.get("slots", 16),
            whole=more.get("whole", False),
        )
    )


def failed(outcome: LayoutOutcome) -> set[str]:
    return {finding.code for finding in outcome.findings if finding.status == "fail"}


def test_the_registry_lists_the_faults_in_the_order_of_the_contract() -> None:
    names = list(faults())
    assert [name for name in names if name in CONTRACT_ORDER] == CONTRACT_ORDER


def test_every_check_and_fault_of_packs_and_masks_is_explained_in_full() -> None:
    infos = [info for code, info in checks().items() if code[3] in "123"]
    assert len(infos) >= 29
    for info in infos:
        assert all([info.statement, info.why, info.cause, info.fix]), info.code
    for name in CONTRACT_ORDER:
        fault = faults()[name]
        assert all([fault.statement, fault.why, fault.cause, fault.fix, fault.commands]), name


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32, torch.uint64]
)
def test_right_offsets_of_any_integer_dtype_pass(dtype: torch.dtype) -> None:
    outcome = judged(dtype=dtype)
    assert failed(outcome) == set()
    assert outcome.faults == {}
    assert outcome.layout is not None
    assert outcome.layout.cu_seqlens.tolist() == REAL
    assert outcome.layout.cu_seqlens_padded.tolist() == PADDED
    assert outcome.layout.cp_size == 2


def test_without_offsets_the_geometry_gives_the_layout() -> None:
    outcome = judged(None, None)
    assert failed(outcome) == set()
    assert outcome.layout is not None
    assert outcome.layout.cu_seqlens_padded.tolist() == PADDED
    assert failed(judged(None, None, slots=20)) == {"OPD107"}
    assert judged(None, None, slots=20).layout is None


@pytest.mark.parametrize(
    ("case", "codes", "fault"),
    [
        ({"real": [0.0, 3.0, 8.0, 10.0], "dtype": torch.float32}, {"OPD101"}, None),
        ({"real": [1, 3, 8, 10]}, {"OPD102", "OPD108"}, None),
        ({"real": [0, 8, 3, 10]}, {"OPD103", "OPD105", "OPD108"}, "cu-seqlens-not-monotone"),
        ({"real": PADDED, "padded": REAL}, {"OPD105", "OPD106", "OPD107", "OPD108"},
         "cu-seqlens-swapped"),
        ({"real": [0, 1, 4, 5], "padded": [0, 2, 6, 8]}, {"OPD106", "OPD107", "OPD108"},
         "cu-seqlens-divided-by-cp"),
        ({"padded": [0, 4, 12, 20]}, {"OPD107"}, "cu-seqlens-wrong-end"),
        ({"real": [0, 3, 8, 13]}, {"OPD108"}, "cu-seqlens-wrong-end"),
        ({"real": [0, 2, 6, 7]}, {"OPD108"}, "lengths-off-by-one"),
        ({"real": [0, 4, 10, 13]}, {"OPD108"}, "lengths-off-by-one"),
        ({"real": [0, 3, 8]}, {"OPD104", "OPD108"}, None),
        ({"padded": [0, 6, 12, 16]}, {"OPD106"}, "padding-multiple-wrong"),
        ({"geometry": PackGeometry(cp_size=2, fp8="tensorwise")}, {"OPD106"},
         "padding-multiple-wrong"),
        ({"index": [0, 0, 1]}, {"OPD109"}, None),
        ({"index": [0, 1, 9]}, {"OPD109"}, None),
        ({"lengths": [*LENGTHS, 4]}, {"OPD104"}, None),
    ],
)  # fmt: skip
def test_each_mistake_fails_its_own_checks_and_is_named(
    case: dict[str, Any], codes: set[str], fault: str | None
) -> None:
    outcome = judged(**case)
    found = failed(outcome)
    assert codes <= found | {"OPD105"}, found
    assert found - {"OPD105"} <= codes, found
    assert list(outcome.faults)[:1] == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("real", "padded", "slots", "suspect"),
    [
        (PADDED, PADDED, 16, "cu-seqlens-padded-twice"),
        ([0, 3, 8, 14], [0, 4, 12, 20], 20, "tail-not-clamped"),  # a tail of 4
        ([0, 3, 8, 16], [0, 4, 12, 20], 20, "tail-not-clamped"),
    ],
)
def test_lengths_that_take_padding_in_warn_until_the_content_disagrees(
    real: list[int], padded: list[int], slots: int, suspect: str
) -> None:
    outcome = judged(real, padded, slots=slots)
    assert failed(outcome) == set()
    assert outcome.suspects == {suspect}
    assert outcome.layout is not None
    assert outcome.layout.lengths.tolist() == LENGTHS
    outcome.settle(content_agrees=True)
    assert failed(outcome) == set()
    outcome.settle(content_agrees=False)
    assert failed(outcome) == {"OPD108"}


def test_a_tail_segment_and_empty_segments_past_the_rows_are_right() -> None:
    outcome = judged([0, 3, 8, 10, 10, 10], [0, 4, 12, 16, 20, 20], slots=20)
    assert failed(outcome) == set()
    assert outcome.layout is not None
    assert outcome.layout.num_rows == 3


def test_a_part_of_the_batch_is_told_by_its_index() -> None:
    outcome = judged([0, 5, 8], [0, 8, 12], slots=12, index=[1, 0])
    assert failed(outcome) == set()
    assert outcome.rows.tolist() == [1, 0]
    assert outcome.lengths.tolist() == [5, 3]


def test_rows_that_do_not_fit_their_segments_fail() -> None:
    outcome = judged([0, 3, 7, 9], [0, 4, 8, 12], slots=12)
    assert "OPD108" in failed(outcome)
    alone = judged(None, [0, 4, 8, 12], slots=12)
    assert "OPD105" in failed(alone)
