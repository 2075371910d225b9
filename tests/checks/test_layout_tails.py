"""What is padding, what is a tail, and which multiple each segment has to have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from opdtool.checks.layout import check_layout
from opdtool.checks.layout_multiples import absorbed_tail
from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.core.geometry import PackGeometry


def judged(
    lengths: list[int], real: Any, padded: Any, slots: int | None = None, **geometry: Any
) -> LayoutOutcome:
    def vector(values: Any) -> torch.Tensor | None:
        if values is None or isinstance(values, torch.Tensor):
            return values
        return torch.tensor(values, dtype=torch.int32)

    return check_layout(
        PackVectors(
            cu_seqlens=vector(real),
            cu_seqlens_padded=vector(padded),
            sequence_index=None,
            lengths=np.array(lengths, dtype=np.int64),
            geometry=PackGeometry(**geometry),
            slots=slots or int(padded[-1]),
            whole=False,
        )
    )


def status(outcome: LayoutOutcome, code: str, tensor: str | None = None) -> set[str]:
    return {f.status for f in outcome.findings if f.code == code and tensor in (None, f.tensor)}


@pytest.mark.parametrize(
    ("lengths", "real", "padded", "geometry"),
    [
        # 4 + 3 tokens in 6 + 3 slots; 16 in all: the last one absorbs 7, and 10 is no multiple of 3
        ([4, 3], [0, 4, 7], [0, 6, 16], {"pad_multiple": 3, "fp8": "tensorwise"}),
        ([4, 3], [0, 4, 7], [0, 6, 20], {"pad_multiple": 3, "pad_packed_to": 20}),
        (
            [4, 3],
            [0, 4, 7, 7],
            [0, 6, 9, 16],
            {"pad_multiple": 3, "fp8": "tensorwise", "tail": "segment"},
        ),
        # CP 2: 4 divides all, 12 the sequences
        (
            [4, 3],
            [0, 4, 7],
            [0, 12, 32],
            {"cp_size": 2, "pad_multiple": 12, "pad_packed_multiple": 8},
        ),
        (
            [4, 3],
            [0, 4, 7, 7],
            [0, 12, 24, 32],
            {"cp_size": 2, "pad_multiple": 12, "pad_packed_multiple": 8, "tail": "segment"},
        ),
    ],
)
def test_a_tail_need_not_be_a_multiple_of_what_sequences_are_padded_to(
    lengths: list[int], real: list[int], padded: list[int], geometry: dict[str, Any]
) -> None:
    made = PackGeometry(**geometry).layout(lengths)
    assert made.cu_seqlens_padded.tolist() == padded
    outcome = judged(lengths, real, padded, **geometry)
    assert {f.status for f in outcome.findings} <= {"pass"}
    assert outcome.faults == {}


@pytest.mark.parametrize(
    ("lengths", "padded", "geometry", "segment"),
    [
        ([4, 3], [0, 4, 16], {"pad_multiple": 3, "fp8": "tensorwise"}, 0),
        ([3, 4], [0, 3, 8], {"pad_multiple": 3, "pad_packed_multiple": 8}, 1),  # 6 are needed
        ([4, 3], [0, 12, 30], {"cp_size": 2, "pad_multiple": 12}, 1),  # no multiple of 4
        (
            [4, 3],
            [0, 6, 10, 16],
            {"pad_multiple": 3, "fp8": "tensorwise", "tail": "segment"},
            1,
        ),
        ([4, 3], [0, 12, 24, 30], {"cp_size": 2, "pad_multiple": 12, "tail": "segment"}, 2),
    ],
)
def test_segments_beside_the_tail_and_what_ranks_cut_are_multiples_still(
    lengths: list[int], padded: list[int], geometry: dict[str, Any], segment: int
) -> None:
    real = [0, *np.cumsum(lengths).tolist()]
    real += [real[-1]] * (len(padded) - len(real))
    outcome = judged(lengths, real, padded, **geometry)
    (finding,) = [f for f in outcome.findings if f.code == "OPD106"]
    assert finding.status == "fail"
    assert finding.first[0]["segment"] == segment
    assert "padding-multiple-wrong" in outcome.faults


def test_offsets_that_are_multiples_are_not_blamed_for_a_tensor_that_is_short() -> None:
    outcome = judged([4, 3], [0, 4, 7], [0, 4, 8], slots=6, cp_size=2)
    assert status(outcome, "OPD107") == {"fail"}
    assert status(outcome, "OPD106") == {"pass"}
    assert "padding-multiple-wrong" not in outcome.faults


@pytest.mark.parametrize(
    ("lengths", "width", "geometry", "tail"),
    [
        ([4, 3, 3], [4, 4, 4], {}, 0),  # each padded to 4, which no option told
        ([4, 3, 3], [4, 4, 12], {}, 8),
        ([4, 4, 3], [4, 4, 4], {}, 0),
        ([5, 4, 3], [5, 4, 4], {}, 1),  # no multiple has 5, 4 and 4
        ([4, 3, 3], [4, 4, 5], {}, 1),
        ([3], [16], {}, 0),  # what it was padded to is anyone's guess
        ([3], [16], {"pad_packed_to": 16}, 13),
        ([3], [16], {"pad_multiple": 4}, 12),
        ([4, 3, 3], [4, 4, 4], {"pad_multiple": 4}, 0),
        ([4, 3, 3], [4, 4, 12], {"pad_multiple": 4}, 8),
        ([4, 3, 3], [4, 4, 4, 52], {}, 0),  # a segment of its own
        ([4, 3, 3], [4, 4, 12], {"pad_multiple": 4, "tail": "segment"}, 0),
        ([4, 3, 3], [4, 4, 12, 0], {"pad_multiple": 4}, 8),
        ([], [8], {}, 0),
    ],
)
def test_a_tail_is_what_no_padding_of_sequences_explains(
    lengths: list[int], width: list[int], geometry: dict[str, Any], tail: int
) -> None:
    numbers = np.array(lengths, dtype=np.int64), np.array(width, dtype=np.int64)
    assert absorbed_tail(*numbers, PackGeometry(**geometry)) == tail


TAIL_OF_8 = {"pad_multiple": 4, "pad_packed_to": 16}  # lengths 3, 3: 4 + 4 slots and a tail of 8


@pytest.mark.parametrize("last", [5, 6, 7, 8, 9, 10])
def test_a_last_length_that_takes_in_a_part_of_the_tail_fails(last: int) -> None:
    outcome = judged([3, 3], [0, 3, 3 + last], [0, 4, 16], **TAIL_OF_8)
    assert status(outcome, "OPD108") == {"fail"}
    assert outcome.suspects == set()


@pytest.mark.parametrize("last", [11, 12])  # its three tokens and the tail, or all its slots
def test_a_last_length_that_takes_in_the_whole_tail_only_warns(last: int) -> None:
    outcome = judged([3, 3], [0, 3, 3 + last], [0, 4, 16], **TAIL_OF_8)
    assert status(outcome, "OPD108") == {"warn"}
    assert outcome.suspects == {"tail-not-clamped"}


@pytest.mark.parametrize("geometry", [{}, {"pad_packed_to": 16}, {"pad_multiple": 8}])
@pytest.mark.parametrize(("wrong", "fault"), [(5, "lengths-off-by-one"), (3, "lengths-off-by-one")])
def test_one_row_whose_length_is_off_by_one_is_named(
    geometry: dict[str, Any], wrong: int, fault: str
) -> None:
    outcome = judged([4], [0, wrong], [0, 16], **geometry)
    assert status(outcome, "OPD108") == {"fail"}
    assert list(outcome.faults) == [fault]


def test_a_last_length_that_takes_in_padding_where_there_is_no_tail_fails() -> None:
    outcome = judged([3, 3], [0, 3, 7], [0, 4, 8], pad_multiple=4)
    assert status(outcome, "OPD108") == {"fail"}
    assert judged([3, 3], [0, 4, 8], [0, 4, 8], pad_multiple=4).soft == {"OPD108"}


@pytest.mark.parametrize(("real", "word"), [([0, 4, 7, 15], "warn"), ([0, 4, 7, 9], "fail")])
def test_a_tail_segment_counts_as_real_whole_or_not_at_all(real: list[int], word: str) -> None:
    outcome = judged([4, 3], real, [0, 4, 8, 16], pad_multiple=4, tail="segment")
    assert status(outcome, "OPD108") == {word}


def test_offsets_stored_as_floats_fail_for_their_dtype_alone() -> None:
    real, padded = torch.tensor([0.0, 4.0, 7.0]), torch.tensor([0.0, 4.0, 16.0])
    outcome = judged([4, 3], real, padded, slots=16)
    assert {f.code for f in outcome.findings if f.status == "fail"} == {"OPD101"}
    assert outcome.layout is not None
    assert outcome.layout.cu_seqlens_padded.tolist() == [0, 4, 16]
    for broken in ([0.0, 4.5, 16.0], [0.0, float("nan"), 16.0], [0.0, 4.0, float("inf")]):
        outcome = judged([4, 3], real, torch.tensor(broken), slots=16)
        assert outcome.layout is None
        assert outcome.faults == {}
