"""Every finding on cumulative lengths word by word, with its places, and the layout it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.checks.layout import check_layout
from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.core.geometry import PackGeometry
from opdtool.findings import MAX_PLACES, Finding

# Three rows of 3, 5 and 2 tokens, padded to multiples of 4.
LENGTHS = [3, 5, 2]
REAL = [0, 3, 8, 10]
PADDED = [0, 4, 12, 16]


def judged(real: Any = REAL, padded: Any = PADDED, **more: Any) -> LayoutOutcome:
    def vector(values: Any) -> Tensor | None:
        if values is None or isinstance(values, Tensor):
            return values
        return torch.tensor(values, dtype=torch.int32)

    index = more.get("index")
    return check_layout(
        PackVectors(
            cu_seqlens=vector(real),
            cu_seqlens_padded=vector(padded),
            sequence_index=index if index is None or isinstance(index, Tensor) else vector(index),
            lengths=np.array(more.get("lengths", LENGTHS), dtype=np.int64),
            geometry=more.get("geometry", PackGeometry(cp_size=2)),
            slots=more.get("slots", 16),
            whole=more.get("whole", False),
        )
    )


def found(outcome: LayoutOutcome, code: str) -> list[Finding]:
    return [finding for finding in outcome.findings if finding.code == code]


def told(outcome: LayoutOutcome) -> list[tuple[str, str]]:
    return [(finding.code, finding.status) for finding in outcome.findings]


def the(outcome: LayoutOutcome, code: str) -> Finding:
    """The one finding of a code that failed, or else the one that there is."""
    all_found = found(outcome, code)
    failed = [finding for finding in all_found if finding.status == "fail"] or all_found
    assert len(failed) == 1
    return failed[0]


def test_right_offsets_pass_each_check_once_a_vector() -> None:
    outcome = judged()
    assert [(f.code, f.status, f.tensor, f.message) for f in outcome.findings] == [
        ("OPD101", "pass", "cu_seqlens", "int32 [4]"),
        ("OPD102", "pass", "cu_seqlens", "starts at 0"),
        ("OPD103", "pass", "cu_seqlens", "never falls"),
        ("OPD101", "pass", "cu_seqlens_padded", "int32 [4]"),
        ("OPD102", "pass", "cu_seqlens_padded", "starts at 0"),
        ("OPD103", "pass", "cu_seqlens_padded", "never falls"),
        ("OPD104", "pass", None, "3 segments for 3 rows"),
        ("OPD107", "pass", None, "16 slots, as many as are dumped"),
        ("OPD106", "pass", "cu_seqlens_padded", "multiples of 4"),
        ("OPD105", "pass", None, "no sequence is longer than its segment"),
        ("OPD108", "pass", "cu_seqlens", "3 lengths as in the batch"),
    ]
    layout = outcome.layout
    assert layout is not None
    assert (layout.cu_seqlens.tolist(), layout.cu_seqlens_padded.tolist()) == (REAL, PADDED)
    assert (layout.cp_size, layout.sequence_index.tolist()) == (2, [0, 1, 2])
    assert outcome.dump_lengths is not None
    assert outcome.dump_lengths.tolist() == LENGTHS
    assert (outcome.rows.tolist(), outcome.lengths.tolist()) == ([0, 1, 2], LENGTHS)
    assert (outcome.faults, outcome.soft, outcome.suspects) == ({}, set(), set())


def test_a_vector_that_is_not_there_is_skipped_and_the_geometry_speaks() -> None:
    none = judged(None, None)
    assert told(none) == [("OPD101", "skip"), ("OPD101", "skip"), ("OPD107", "pass")]
    assert [f.message for f in found(none, "OPD101")] == [
        f"the dump has no {name}: its dtype, start and order are not checked"
        for name in ("cu_seqlens", "cu_seqlens_padded")
    ]
    assert none.layout is not None
    assert none.layout.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    short = judged(None, None, slots=20)
    assert short.layout is None
    end = the(short, "OPD107")
    assert end.message == (
        "the geometry ends at 16, but the dump holds 20 slots; give the padding it was packed with "
        "(--cp, --tp, --pad-multiple, --fp8, --pad-packed-to, --tail)"
    )
    assert end.tensor == "cu_seqlens_padded"


def test_with_real_offsets_alone_their_lengths_are_checked_and_the_geometry_gives_the_rest() -> (
    None
):
    outcome = judged(REAL, None)
    assert told(outcome) == [
        ("OPD101", "pass"),
        ("OPD102", "pass"),
        ("OPD103", "pass"),
        ("OPD101", "skip"),
        ("OPD104", "pass"),
        ("OPD107", "pass"),
        ("OPD105", "skip"),
        ("OPD108", "pass"),
    ]
    assert outcome.layout is not None
    assert the(outcome, "OPD105").message == "no cu_seqlens_padded to compare with"
    assert the(judged([0, 3, 7, 9], None), "OPD108").status == "fail"
    longer = judged(REAL, None, slots=17)
    assert longer.layout is None
    assert the(longer, "OPD107").status == "fail"


def test_with_padded_offsets_alone_rows_must_fit_and_lengths_are_the_batchs() -> None:
    outcome = judged(None, PADDED)
    assert told(outcome) == [
        ("OPD101", "skip"),
        ("OPD101", "pass"),
        ("OPD102", "pass"),
        ("OPD103", "pass"),
        ("OPD104", "pass"),
        ("OPD107", "pass"),
        ("OPD106", "pass"),
        ("OPD105", "pass"),
        ("OPD108", "skip"),
    ]
    assert the(outcome, "OPD108").message == "the dump has no cu_seqlens"
    tight = judged(None, [0, 4, 8, 16])
    fits = the(tight, "OPD105")
    assert fits.message == "segment 1 has 5 real tokens in 4 padded slots"
    assert fits.first == ({"segment": 1, "expected": "<= 4", "actual": 5},)
    assert (fits.mismatches, fits.total, fits.tensor) == (1, 3, "cu_seqlens")
    assert tight.layout is not None
    first = judged(None, [0, 4, 8, 16], lengths=[5, 3, 2])
    assert the(first, "OPD105").first == ({"segment": 0, "expected": "<= 4", "actual": 5},)
    tailed = judged(None, [*PADDED, 20], slots=20)
    assert the(tailed, "OPD105").status == "pass"
    assert tight.layout.lengths.tolist() == [3, 4, 2]  # cut short where it does not fit


def test_a_vector_that_cannot_be_used_leaves_the_geometrys_layout() -> None:
    for bad in (torch.zeros(0, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)):
        outcome = judged(bad, bad)
        assert [f.message for f in found(outcome, "OPD101")] == [
            f"has shape {list(bad.shape)}; expected [N+1]"
        ] * 2
        assert {status for _, status in told(outcome)} == {"fail"}
        one = judged(None, bad)
        assert found(one, "OPD107") == []
    assert judged(None, torch.zeros(0, dtype=torch.int32)).layout is None  # of no rows at all
    square = judged(None, torch.zeros(2, 2, dtype=torch.int32)).layout
    assert square is not None
    assert square.cu_seqlens_padded.tolist() == PADDED
    scalar = judged(torch.tensor(3), PADDED)
    assert the(scalar, "OPD101").status == "fail"
    column = judged(torch.tensor(REAL).reshape(4, 1), torch.tensor(PADDED).reshape(1, 4))
    assert all(status == "pass" for _, status in told(column))
    assert column.layout is not None


def test_offsets_past_two_to_the_63_are_an_overflow() -> None:
    huge = torch.tensor([0, 3, 8, 2**63], dtype=torch.uint64)
    outcome = judged(huge, PADDED)
    assert the(outcome, "OPD101").message == "holds values past 2**63; an overflow"
    largest = torch.tensor([0, 3, 8, 2**63 - 1], dtype=torch.uint64)
    assert [f.status for f in found(judged(largest, PADDED), "OPD101")] == ["pass", "pass"]
    plain = torch.tensor(REAL, dtype=torch.uint64)
    assert all(status == "pass" for _, status in told(judged(plain, PADDED)))


@pytest.mark.parametrize(
    ("values", "used"),
    [
        (torch.tensor([0.0, 4, 12, 16]), True),
        (torch.tensor([0.0, 4.5, 12, 16]), False),
        (torch.tensor([0.0, 4, 12, float("nan")]), False),
        (torch.tensor([0.0, 4, 12, 2.0**53], dtype=torch.float64), False),
        (torch.tensor([0.0, 4, 12, 2.0**53 - 1], dtype=torch.float64), True),
        (torch.tensor([0.0, -4, 12, 16]), True),
        (torch.tensor([False, True]), False),
        (torch.tensor([[0.0, 4, 12, 16]]), False),
        (torch.zeros(0), False),
    ],
)
def test_offsets_of_a_wrong_dtype_are_used_where_they_are_whole_numbers(
    values: Tensor, used: bool
) -> None:
    outcome = judged(REAL, values)
    dtype = the(outcome, "OPD101")
    name = str(values.dtype).removeprefix("torch.")
    assert dtype.message == f"has dtype {name}; cumulative lengths are integers, such as int32"
    assert dtype.tensor == "cu_seqlens_padded"
    assert len(found(outcome, "OPD102")) == (2 if used else 1)
    if used and float(values[-1]) == 16 and float(values[1]) == 4:
        assert outcome.layout is not None
        assert outcome.layout.cu_seqlens_padded.tolist() == PADDED


def test_a_start_other_than_zero_is_told() -> None:
    outcome = judged([1, 4, 9, 11], PADDED)
    start = the(outcome, "OPD102")
    assert start.message == "starts at 1; cumulative lengths start at 0"
    assert start.tensor == "cu_seqlens"


def test_offsets_that_fall_are_told_with_every_place() -> None:
    outcome = judged([0, 8, 3, 10, 9], [0, 4, 12, 16, 16])
    falls = the(outcome, "OPD103")
    assert falls.message == "falls from 8 to 3 at entry 2"
    assert falls.first == (
        {"segment": 1, "expected": ">= 8", "actual": 3},
        {"segment": 3, "expected": ">= 10", "actual": 9},
    )
    assert (falls.mismatches, falls.total) == (2, 5)
    assert outcome.faults["cu-seqlens-not-monotone"] == "cu_seqlens falls from 8 to 3 at entry 2"
    both = judged([0, 8, 3, 10], [0, 12, 4, 16])
    assert both.faults["cu-seqlens-not-monotone"].startswith("cu_seqlens falls")
    assert both.layout is not None  # the geometry's
    assert both.layout.cu_seqlens_padded.tolist() == PADDED


def test_the_number_of_segments_is_held_to_the_other_vector_and_to_the_rows() -> None:
    outcome = judged([0, 3, 8], PADDED)
    assert the(outcome, "OPD104").message == (
        "cu_seqlens has 3 entries and cu_seqlens_padded 4; both have one more than there are "
        "segments"
    )
    few = judged([0, 3, 8], [0, 4, 12], slots=12)
    assert the(few, "OPD104").message == (
        "2 segments for the 3 rows of the batch; where a pack holds part of a batch, "
        "sequence_index must say which rows"
    )
    assert few.rows.tolist() == [0, 1]
    more = judged([0, 3, 8, 10, 10], [0, 4, 12, 16, 16])
    assert the(more, "OPD104").message == "4 segments for 3 rows"
    part = judged([0, 3, 5], [0, 4, 8], index=[0, 2], slots=8)
    assert the(part, "OPD104").message == "2 segments for 2 rows"


def test_an_index_names_each_row_once_and_no_others() -> None:
    def index(values: Any) -> Finding:
        return the(judged(index=values), "OPD109")

    right = index([2, 0, 1])
    assert (right.status, right.message, right.tensor) == (
        "pass",
        "3 rows of 3, each once",
        "sequence_index",
    )
    assert judged(index=[2, 0, 1]).rows.tolist() == [2, 0, 1]
    assert judged(index=[2, 0, 1]).lengths.tolist() == [2, 3, 5]
    assert index([0, 3, 1]).message == "entry 1 is 3, outside the batch's rows 0..2"
    assert index([0, -1, 1]).message == "entry 1 is -1, outside the batch's rows 0..2"
    assert index([0, 2, 2]).message == "row 2 is named 2 times; expected once"
    four = judged(index=[0, 1, 2, 3], lengths=[3, 5, 2, 4])
    assert (
        the(four, "OPD109").message == "has 4 entries for 3 segments; expected no more than those"
    )
    assert four.rows.tolist() == [0, 1, 2]  # as if there were no index
    assert index(torch.tensor([0.0, 1, 2])).message == (
        "has dtype float32 and shape [3]; expected integers [n]"
    )
    assert index(torch.tensor([[0], [1], [2]])).status == "pass"
    assert index(torch.tensor([[0, 1, 2]])).status == "pass"
    assert index(torch.tensor([[0, 1], [2, 0]])).status == "fail"
    assert index(torch.tensor([[[0, 1, 2]]])).status == "fail"
    square = judged(
        [0, 1, 2, 3, 4], [0, 4, 8, 12, 16], lengths=[1] * 4, index=torch.tensor([[0, 1], [2, 3]])
    )
    assert the(square, "OPD109").message.startswith("has dtype int64 and shape [2, 2]")
    padded = judged(None, PADDED, index=[0, 1, 2, 3], lengths=[3, 5, 2, 4])
    assert the(padded, "OPD109").message == the(four, "OPD109").message
    without = judged(None, None, index=[2, 0, 1])
    assert the(without, "OPD109").status == "pass"
    assert without.layout is not None
    assert without.layout.sequence_index.tolist() == [2, 0, 1]
    assert without.layout.padded_lengths.tolist() == [4, 4, 8]


def test_a_pack_of_fewer_segments_than_the_index_tells_has_those_rows_alone() -> None:
    outcome = judged([0, 3], [0, 4], lengths=[3, 5, 2], slots=4)
    assert outcome.rows.tolist() == [0]
    nothing = judged([0], [0], slots=0)
    assert nothing.rows.tolist() == []
    assert judged(torch.zeros(0, dtype=torch.int32), None).rows.tolist() == []


def test_the_end_of_the_padded_offsets_is_held_to_the_dump() -> None:
    outcome = judged(slots=20)
    assert the(outcome, "OPD107").message == (
        "cu_seqlens_padded ends at 16, but the dump holds 20 slots"
    )
    assert outcome.layout is not None  # mended: the last segment takes the rest
    assert outcome.layout.cu_seqlens_padded.tolist() == [0, 4, 12, 20]
    assert outcome.faults == {
        "cu-seqlens-wrong-end": "cu_seqlens_padded ends at 16, the pack at 20"
    }
    back = judged([*REAL, 10], [0, 4, 12, 16, 24], slots=14)  # would fall at the end
    assert back.faults == {}
    early = judged(slots=13)  # no room for the last row's two tokens
    assert early.layout is None
    assert early.faults == {}
    just = judged(slots=16, padded=[0, 4, 12, 18], whole=True)
    assert just.layout is not None
    assert just.layout.padded_lengths.tolist() == [4, 8, 4]
    two = judged(slots=14, whole=True)
    assert two.layout is not None
    assert two.layout.padded_lengths.tolist() == [4, 8, 2]


def test_swapped_vectors_are_told_and_mended() -> None:
    outcome = judged(PADDED, REAL)
    assert outcome.faults == {
        "cu-seqlens-swapped": "cu_seqlens holds the padded offsets and cu_seqlens_padded the real "
        "ones"
    }
    assert outcome.layout is not None
    assert outcome.layout.cu_seqlens_padded.tolist() == PADDED
    assert outcome.layout.lengths.tolist() == LENGTHS
    # Without the room for the rows, of another number, or not to the end it is something else.
    for real, slots in (([0, 4, 8, 16], 16), ([0, 4, 12, 16, 16], 16), (PADDED, 20)):
        assert "cu-seqlens-swapped" not in judged(real, REAL, slots=slots).faults
    same = judged(REAL, REAL, slots=10, geometry=PackGeometry())
    assert same.faults == {}
    assert "cu-seqlens-swapped" not in judged(PADDED, [0, 3, 7, 10]).faults
    full = judged(PADDED, [0, 4, 9, 11], lengths=[4, 5, 2])
    assert list(full.faults) == ["cu-seqlens-swapped"]
    tail = judged([*PADDED, 20], [*REAL, 10], slots=20)
    assert list(tail.faults) == ["cu-seqlens-swapped"]
    more = judged([*PADDED, 20], [*REAL, 12], slots=20)  # a tail that counts as real
    assert "cu-seqlens-swapped" not in more.faults


def test_offsets_divided_by_the_ranks_are_told_and_mended() -> None:
    outcome = judged(REAL, [0, 2, 6, 8])
    assert outcome.faults["cu-seqlens-divided-by-cp"] == "cu_seqlens_padded ends at 8 = 16 / 2"
    assert outcome.layout is not None
    assert outcome.layout.cu_seqlens_padded.tolist() == PADDED
    longer = judged(REAL, [0, 2, 6, 12], slots=24)
    assert longer.layout is not None
    assert longer.layout.cu_seqlens_padded.tolist() == [0, 4, 12, 24]
    empty = judged([*REAL, 10], [0, 2, 6, 8, 8])
    assert "cu-seqlens-divided-by-cp" in empty.faults
    tight = judged(REAL, [0, 1, 6, 8])  # times two there is no room for the first row
    assert "cu-seqlens-divided-by-cp" not in tight.faults
    alone = judged(REAL, [0, 2, 6, 8], geometry=PackGeometry())
    assert "cu-seqlens-divided-by-cp" not in alone.faults
    real = judged([0, 1, 4, 5], PADDED)
    assert real.faults == {"cu-seqlens-divided-by-cp": "cu_seqlens ends at 5, not at 10"}
    four = PackGeometry(pad_multiple=4)
    one = judged([0, 1, 4, 5], PADDED, geometry=four)
    assert one.faults == {}
    past = judged([0, 3, 8, 10, 12], [*PADDED, 20], slots=20, geometry=four)
    assert past.faults == {"cu-seqlens-wrong-end": "cu_seqlens ends at 12, the batch at 10"}
    tail = judged([0, 1, 4, 5, 5], [*PADDED, 20], slots=20)
    assert "cu-seqlens-divided-by-cp" in tail.faults
    more = judged([0, 1, 4, 5, 6], [*PADDED, 20], slots=20)
    assert "cu-seqlens-divided-by-cp" in more.faults


def test_offsets_that_the_ranks_cannot_be_cut_by_are_not_used() -> None:
    odd = [0, 6, 12, 16]
    outcome = judged(REAL, odd)
    assert the(outcome, "OPD106").status == "fail"
    assert outcome.layout is not None
    assert outcome.layout.cu_seqlens_padded.tolist() == PADDED  # the geometry's instead
    with np.errstate(all="raise"):
        whole = judged(REAL, odd, whole=True)
    assert whole.layout is not None
    assert whole.layout.cu_seqlens_padded.tolist() == odd
    assert whole.layout.cp_size == 1
    even = judged(REAL, PADDED, whole=True)
    assert even.layout is not None
    assert even.layout.cp_size == 2
    none = judged(REAL, [0, 6, 12, 20], slots=20)
    assert none.layout is None
    alone = judged(REAL, [0, 3, 12, 17], slots=17, geometry=PackGeometry())
    assert alone.layout is not None
    assert alone.layout.cu_seqlens_padded.tolist() == [0, 3, 12, 17]
    four = judged(REAL, [0, 16, 24, 32], slots=32, geometry=PackGeometry(cp_size=4))
    assert four.layout is not None
    assert four.layout.cu_seqlens_padded.tolist() == [0, 16, 24, 32]
    assert four.layout.cp_size == 4


def test_real_lengths_longer_than_their_segments_are_told_with_every_place() -> None:
    outcome = judged([0, 5, 10, 16], PADDED)
    fits = the(outcome, "OPD105")
    assert fits.message == "segment 0 has 5 real tokens in 4 padded slots"
    assert fits.first == (
        {"segment": 0, "expected": "<= 4", "actual": 5},
        {"segment": 2, "expected": "<= 4", "actual": 6},
    )
    assert (fits.mismatches, fits.total) == (2, 3)
    uneven = judged([0, 3, 8], PADDED)
    assert the(uneven, "OPD105").status == "skip"


def test_real_lengths_that_are_not_the_batchs_are_told_with_every_place() -> None:
    outcome = judged([0, 2, 8, 9], PADDED)
    lengths = the(outcome, "OPD108")
    assert lengths.message == "sequence 0 has a real length of 2; 3 in the batch"
    assert lengths.first == (
        {"sequence": 0, "expected": 3, "actual": 2},
        {"sequence": 1, "expected": 5, "actual": 6},
        {"sequence": 2, "expected": 2, "actual": 1},
    )
    assert (lengths.mismatches, lengths.total, lengths.tensor) == (3, 3, "cu_seqlens")
    assert outcome.faults == {}
    index = judged([0, 2, 4, 9], [0, 4, 8, 16], index=[2, 0, 1])
    assert the(index, "OPD108").first == ({"sequence": 0, "expected": 3, "actual": 2},)
    past = judged([0, 3, 8, 10, 12], [0, 4, 12, 16, 20], slots=20)
    assert the(past, "OPD108").message == (
        "segments past the 3 rows hold real tokens; they come from no row of the batch"
    )
    assert past.dump_lengths is not None
    assert past.dump_lengths.tolist() == LENGTHS
    few = judged([0, 3, 7], PADDED)
    assert few.dump_lengths is None
    assert the(few, "OPD108").first == ({"sequence": 1, "expected": 5, "actual": 4},)


def test_known_mistakes_of_the_real_lengths_are_named() -> None:
    less = judged([0, 2, 6, 7], PADDED)
    assert less.faults == {"lengths-off-by-one": "every real length is one less than in the batch"}
    more = judged([0, 4, 10, 13], PADDED)
    assert more.faults == {"lengths-off-by-one": "every real length is one more than in the batch"}
    end = judged([0, 3, 8, 14], PADDED, lengths=LENGTHS)
    assert end.faults == {"cu-seqlens-wrong-end": "cu_seqlens ends at 14, the batch at 10"}
    part = judged([0, 2, 6, 8], PADDED)
    assert part.faults == {}
    # Where the offsets are broken in another way, that is the cause.
    fallen = judged([0, 3, 8, 7], PADDED)
    assert list(fallen.faults) == ["cu-seqlens-not-monotone"]


def test_lengths_lost_to_the_padded_ones_only_warn_and_hint() -> None:
    outcome = judged(PADDED, PADDED)
    lost = the(outcome, "OPD108")
    assert (lost.status, lost.tensor) == ("warn", "cu_seqlens")
    assert lost.message == (
        "equals cu_seqlens_padded: the real lengths are lost, only the batch knows them"
    )
    assert outcome.soft == {"OPD108"}
    assert outcome.suspects == {"cu-seqlens-padded-twice"}
    last = judged([0, 4, 12, 16], [0, 4, 12, 16], lengths=[4, 8, 2])
    assert last.suspects == {"cu-seqlens-padded-twice", "tail-not-clamped"}
    one = judged([0, 4], [0, 4], lengths=[3], slots=4)
    assert the(one, "OPD108").status == "warn"
    short = judged([0, 4, 8, 16], [0, 4, 8, 16])  # no room for the second row: no reason at all
    assert the(short, "OPD108").status == "fail"
    assert short.suspects == set()


def test_a_last_length_with_the_tail_in_it_only_warns_and_hints() -> None:
    long = {"padded": [0, 4, 12, 24], "slots": 24}
    for last in (14, 12):  # two tokens in four slots, and a tail of eight: all but two, or all
        real = [0, 3, 8, 8 + (10 if last == 14 else 12)]
        outcome = judged(real, **long)
        warned = the(outcome, "OPD108")
        length = real[-1] - 8
        assert (warned.status, outcome.suspects) == ("warn", {"tail-not-clamped"})
        assert warned.message == (
            f"the last length, {length}, takes in the tail; the sequence has 2 tokens"
        )
    other = judged([0, 3, 8, 8 + 11], **long)
    assert the(other, "OPD108").status == "fail"
    also = judged([0, 2, 7, 7 + 12], **long)  # another length is wrong as well
    assert the(also, "OPD108").status == "fail"
    apart = judged([0, 3, 8, 10, 18], [0, 4, 12, 16, 24], slots=24)
    assert the(apart, "OPD108").message == (
        "segments past the 3 rows count as real tokens: a tail that is not empty"
    )
    assert apart.suspects == {"tail-not-clamped"}
    two = judged([0, 3, 8, 10, 10, 18], [0, 4, 12, 16, 16, 24], slots=24)
    assert two.suspects == {"tail-not-clamped"}
    half = judged([0, 3, 8, 10, 14], [0, 4, 12, 16, 24], slots=24)
    assert (the(half, "OPD108").status, half.suspects) == ("fail", set())


def test_soft_warnings_become_failures_where_the_content_does_not_agree() -> None:
    outcome = judged(PADDED, PADDED)
    before = list(outcome.findings)
    outcome.settle(content_agrees=True)
    assert outcome.findings == before
    outcome.settle(content_agrees=False)
    changed = [f.code for f, g in zip(outcome.findings, before, strict=True) if f != g]
    assert changed == ["OPD108"]
    assert the(outcome, "OPD108").status == "fail"


def test_an_outcome_keeps_no_more_places_than_are_shown() -> None:
    outcome = judged()
    outcome.findings.clear()
    outcome.add("OPD103", "fail", "many", places=[{"segment": i} for i in range(MAX_PLACES + 2)])
    outcome.add("OPD103", "pass", "none", places=[])
    outcome.add("OPD103", "pass", "nothing said")
    many, none, unsaid = outcome.findings
    assert (many.mismatches, len(many.first)) == (MAX_PLACES + 2, MAX_PLACES)
    assert (none.mismatches, none.first) == (0, ())
    assert (unsaid.mismatches, unsaid.first, unsaid.tensor, unsaid.total) == (None, (), None, None)
