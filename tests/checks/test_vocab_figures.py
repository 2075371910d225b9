"""What the checks of a draft vocabulary count and say, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opdtool.checks.vocab_case import DraftCase
from opdtool.checks.vocab_faults import judge_draft_vocab
from opdtool.findings import Finding

IDS = torch.tensor([1, 2, 5, 7])
RIGHT = DraftCase(
    d2t=IDS - torch.arange(4), vocab_size=40, draft_vocab_size=4, head_rows=4, against=IDS
)


def found(case: DraftCase, code: str) -> Finding:
    return next(each for each in judge_draft_vocab(case)[0] if each.code == code)


def test_the_right_case_is_right() -> None:
    assert {each.status for each in judge_draft_vocab(RIGHT)[0]} <= {"pass", "skip"}
    assert found(RIGHT, "OPD413").message == "the draft head has 4 rows"


@pytest.mark.parametrize(("rows", "mismatches"), [(3, 1), (6, 2)])
def test_rows_of_the_head_too_many_or_too_few_are_counted(rows: int, mismatches: int) -> None:
    finding = found(replace(RIGHT, head_rows=rows), "OPD413")
    assert (finding.status, finding.mismatches, finding.total) == ("fail", mismatches, 4)
    said = f"the draft head has {rows} rows; the draft vocabulary has 4"
    assert finding.message == said


def test_another_map_of_the_same_length_is_told_by_its_entries_alone() -> None:
    finding = found(replace(RIGHT, against=torch.tensor([1, 3, 5, 8])), "OPD414")
    assert (finding.status, finding.mismatches, finding.total) == ("fail", 2, 4)
    assert finding.message.startswith("2 of 4 draft ids stand for another target id")
    assert [dict(place) for place in finding.first] == [
        {"draft_id": 1, "expected": 3, "actual": 2},
        {"draft_id": 3, "expected": 8, "actual": 7},
    ]


def test_another_map_that_is_longer_is_told_by_both_lengths() -> None:
    finding = found(replace(RIGHT, against=torch.tensor([1, 2, 5, 9, 11, 12])), "OPD414")
    assert finding.message.startswith("4 and 6 entries; 1 of 4 draft ids")
    assert (finding.mismatches, finding.total) == (3, 6)


@pytest.mark.parametrize(("count", "said"), [(1, "20"), (10, "29"), (13, "29 and 3 more")])
def test_required_ids_that_are_absent_are_listed_up_to_ten(count: int, said: str) -> None:
    finding = found(replace(RIGHT, must_include=tuple(range(20, 20 + count))), "OPD412")
    assert finding.status == "fail"
    assert finding.message.split(";")[0].endswith(said) or said in finding.message
    assert ("more" in finding.message) == (count > 10)
    assert len(finding.first) == min(count, 10)


def test_end_of_text_ids_that_are_absent_are_a_warning() -> None:
    finding = found(replace(RIGHT, end_ids=(2, 30)), "OPD412")
    assert finding.status == "warn"
    assert ": 30;" in finding.message


def test_ids_out_of_range_are_counted_and_the_first_is_worked_out() -> None:
    finding = found(replace(RIGHT, d2t=torch.tensor([1, 1, 40, 37])), "OPD404")
    assert (finding.status, finding.mismatches, finding.total) == ("fail", 2, 4)
    said = "2 of 4 target ids are outside 0..39; the first: draft id 2 stands for 2 + 40 = 42"
    assert finding.message == said


def test_what_t2d_lacks_and_what_it_has_too_much_are_told_apart() -> None:
    t2d = torch.zeros(40, dtype=torch.bool)
    t2d[torch.tensor([1, 8, 9, 10])] = True  # 2, 5 and 7 are missing
    finding = found(replace(RIGHT, t2d=t2d), "OPD409")
    assert (finding.status, finding.mismatches, finding.total) == ("fail", 6, 40)
    said = "d2t has 3 ids that t2d does not mark, and t2d marks 3 that d2t has not"
    assert finding.message == said
    assert [dict(place)["target_id"] for place in finding.first] == [2, 5, 7, 8, 9, 10]
    assert [dict(place)["actual"] for place in finding.first] == [False] * 3 + [True] * 3
