"""Findings on masks word by word, from counts that are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from opdtool.checks.hypotheses import MaskCase, MaskWeights
from opdtool.checks.masks import Count, MaskScan
from opdtool.checks.masks_findings import MaskFindings, MaskPack
from opdtool.checks.recipes_values import Cells, Slots, as_numbers
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from opdtool.findings import MAX_PLACES, Finding
from tests.checks.judging import MemoryBatch


def pack_of(name: str = "one", *, shift: int = 1, fits: bool = True, **found: Any) -> MaskPack:
    """Rows 5 and 6, of 3 and 2 tokens in 4 slots each, and a tail of 4 slots."""
    layout = PackedLayout.from_cu_seqlens([0, 3, 5, 5], [0, 4, 8, 12], sequence_index=[5, 6])
    dumped = torch.zeros(12)
    batch = MemoryBatch({}, np.array([]), 4)
    case = MaskCase(
        slots=Slots(pieces=[lambda a, b: dumped[a:b]], sizes=[12], decode=as_numbers),
        rows=np.array([5, 6]),
        lengths=np.array([3, 2]),
        width=4,
        layout=layout if fits else None,
        geometry=PackGeometry(),
        whole=True,
        weights=MaskWeights(
            tokens=Cells(batch=batch, name="token_mask", width=4, decode=as_numbers),
            sample=np.ones(7),
        ),
        shift=shift,
    )
    scan = MaskScan(**{"total": 12, "any_nonzero": True, "all_one": False, **found})
    return MaskPack(name=name, case=case, scan=scan)


def findings_of(packs: Sequence[MaskPack], **more: Any) -> list[Finding]:
    return MaskFindings(packs=packs, tensor="m", **more).all()


def the(found: Sequence[Finding], code: str) -> Finding:
    (one,) = (finding for finding in found if finding.code == code)
    return one


def test_a_right_mask_passes_every_check_in_order() -> None:
    found = findings_of([pack_of()])
    assert [(f.code, f.status, f.message, f.mismatches, f.total) for f in found] == [
        ("OPD301", "pass", "as expected", 0, 12),
        ("OPD304", "pass", "finite", 0, 12),
        ("OPD305", "pass", "in range", 0, 12),
        ("OPD306", "pass", "padding has no weight", 0, 12),
        ("OPD307", "pass", "last real slots have none", 0, 12),
        ("OPD308", "pass", "dropped rows have none", 0, 12),
        ("OPD309", "pass", "holds zeros and other values", None, None),
        ("OPD310", "pass", "every kept row has something to train", None, None),
    ]
    assert {f.tensor for f in found} == {"m"}
    assert {f.first for f in found} == {()}
    assert MaskFindings(packs=[], tensor="m").ids is None


def test_an_unshifted_mask_may_train_the_last_token() -> None:
    last = the(findings_of([pack_of(shift=0, last=Count(3))]), "OPD307")
    assert (last.status, last.message) == ("skip", "an unshifted mask may train the last token")


def test_each_rule_that_is_broken_fails_with_its_own_count_and_words() -> None:
    words = {
        "values": ("OPD301", "differ from the expected mask"),
        "finite": ("OPD304", "are not finite"),
        "range": ("OPD305", "are neither 0 nor 1 nor a weight of the batch"),
        "padding": ("OPD306", "have weight in padding"),
        "last": ("OPD307", "are last real slots with weight"),
        "dropped": ("OPD308", "have weight in dropped rows"),
    }
    for rule, (code, text) in words.items():
        broken: dict[str, Any] = {rule: Count(1, [(5, 0.0, 0.5)])}
        found = findings_of([pack_of(**broken)])
        assert [f.code for f in found if f.status == "fail"] == [code]
        failed = the(found, code)
        assert failed.message.startswith(f"1 of 12 slots {text}")
        assert failed.message.endswith(
            "sequence 6, position 1 (slot 5, rank 0): expected 0, found 0.5"
        )
        assert (failed.mismatches, failed.total) == (1, 12)
        assert failed.first == (
            {
                "sequence": 6,
                "segment": 1,
                "position": 1,
                "slot": 5,
                "cp_rank": 0,
                "expected": 0.0,
                "actual": 0.5,
            },
        )


def test_counts_are_summed_over_packs_and_their_places_named() -> None:
    packs = [
        pack_of("a"),
        pack_of("b", values=Count(2, [(0, 1.0, 0.0), (9, 0.0, 1.0)])),
        pack_of("c", values=Count(3, [(4, 1.0, float("nan"))])),
    ]
    failed = the(findings_of(packs), "OPD301")
    assert (failed.mismatches, failed.total) == (5, 36)
    assert "pack" in failed.first[0]
    assert [(place["pack"], place["slot"]) for place in failed.first] == [
        ("b", 0),
        ("b", 9),
        ("c", 4),
    ]
    assert "sequence" not in failed.first[1]  # in the tail
    assert failed.first[1]["segment"] == 2
    assert failed.first[2]["actual"] == "nan"
    assert failed.message.startswith("5 of 36 slots")
    assert "b, sequence 5, position 0" in failed.message


def test_no_more_places_are_kept_than_shown() -> None:
    many = [(i, 0.0, 1.0) for i in range(MAX_PLACES)]
    half = many[: MAX_PLACES // 2 + 1]
    packs = [pack_of(name, padding=Count(99, half)) for name in "abc"]
    first = the(findings_of(packs), "OPD306").first
    assert len(first) == MAX_PLACES
    assert {place["pack"] for place in first} == {"a", "b"}


def test_where_no_layout_fits_only_what_is_not_finite_is_told_by_slot() -> None:
    bad = pack_of(fits=False, finite=Count(1, [(7, 0.0, float("inf"))]), values=Count(3))
    found = findings_of([bad])
    skipped = [f.code for f in found if f.status == "skip"]
    assert skipped == ["OPD301", "OPD305", "OPD306", "OPD307", "OPD308"]
    assert the(found, "OPD301").message == "no layout fits the dump; see the layout checks"
    finite = the(found, "OPD304")
    assert finite.status == "fail"
    assert finite.first == ({"slot": 7, "expected": 0.0, "actual": "inf"},)
    beside = findings_of([bad, pack_of("two", values=Count(2, [(0, 1.0, 0.0)]))])
    assert (the(beside, "OPD301").mismatches, the(beside, "OPD301").total) == (2, 12)
    assert the(beside, "OPD304").total == 24


def ids(row: int, start: int, stop: int) -> Sequence[int]:
    return [100 * row + i for i in range(start, stop)]


def around(slot: int, with_ids: Any = ids) -> object:
    pack = pack_of(values=Count(1, [(slot, 0.0, 1.0)]))
    return the(findings_of([pack], ids=with_ids), "OPD301").first[0].get("token_ids")


def test_the_token_ids_around_a_place_are_shown_as_far_as_the_row_goes() -> None:
    assert around(0) == "[500] 501 502"
    assert around(2) == "500 501 [502]"
    assert around(3) == "500 501 502"  # padding: none is its own
    assert around(5) == "600 [601]"
    assert around(7) == "600 601"
    assert around(9) is None  # a tail has no row
    assert around(0, None) is None


def test_three_token_ids_are_shown_on_each_side() -> None:
    layout = PackedLayout.from_cu_seqlens([0, 9], [0, 16])
    pack = pack_of(values=Count(1, [(4, 0.0, 1.0)]))
    pack.case.layout = layout
    first = the(findings_of([pack], ids=ids), "OPD301").first[0]
    assert first["token_ids"] == "1 2 3 [4] 5 6 7"
    far = pack_of(values=Count(1, [(13, 0.0, 1.0)]))
    far.case.layout = layout
    assert "token_ids" not in the(findings_of([far], ids=ids), "OPD301").first[0]
    edge = pack_of(values=Count(1, [(12, 0.0, 1.0)]))
    edge.case.layout = layout
    assert "token_ids" not in the(findings_of([edge], ids=ids), "OPD301").first[0]
    near = pack_of(values=Count(1, [(11, 0.0, 1.0)]))
    near.case.layout = layout
    assert the(findings_of([near], ids=ids), "OPD301").first[0]["token_ids"] == "8"
    unknown = findings_of([pack_of(fits=False, finite=Count(1, [(7, 0.0, 1.0)]))], ids=ids)
    assert "token_ids" not in the(unknown, "OPD304").first[0]


def constant(*packs: MaskPack) -> tuple[str, str]:
    found = the(findings_of(packs), "OPD309")
    return found.status, found.message


def test_a_mask_of_one_value_all_over_is_warned_of() -> None:
    zero = pack_of(any_nonzero=False)
    ones = pack_of(all_one=True)
    assert constant(zero) == ("warn", "the mask is all zero: nothing is trained")
    assert constant(zero, zero) == ("warn", "the mask is all zero: nothing is trained")
    assert constant(zero, pack_of())[0] == "pass"
    assert constant(ones) == ("warn", "the mask is all one")
    assert constant(ones, pack_of())[0] == "pass"
    assert constant() == ("skip", "the ranks' masks do not belong together")
    assert the(findings_of([]), "OPD307").message.startswith("no layout fits")


def test_kept_rows_without_anything_to_train_are_named_once_in_order() -> None:
    found = the(findings_of([pack_of(empty_rows=[7, 3]), pack_of(empty_rows=[3])]), "OPD310")
    assert (found.status, found.message) == ("warn", "nothing to train in kept rows 3, 7")
    exact = the(findings_of([pack_of(empty_rows=list(range(MAX_PLACES)))]), "OPD310")
    assert exact.message.endswith(f", {MAX_PLACES - 1}")
    more = the(findings_of([pack_of(empty_rows=list(range(MAX_PLACES + 1)))]), "OPD310")
    assert more.message.endswith(f", {MAX_PLACES - 1} and more")
