"""The diagnosis beside toy dumps: numbers in a row, and faults that change some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.checks import diagnose as module
from opdtool.checks.diagnose import (
    Explanation,
    as_diagnosis,
    default_sample,
    diagnose,
    explain,
    makes,
)
from opdtool.checks.hypotheses import NO_ROWS, Axis, Build, Built, Filled, Form, PackCase
from opdtool.checks.recipes import Bools, Cut, Ints, Recipe, Shift, placed
from opdtool.checks.recipes_values import Slots, Values
from opdtool.checks.registry import faults
from opdtool.checks.room import ROOM
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout

FIRST, SECOND, THIRD = "mask-not-shifted", "mask-shifted-right", "mask-shifted-twice"
"""Three faults in the order of the contract."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Toy(Filled):
    """A pack by its values alone."""

    values: Values


@dataclass(slots=True, kw_only=True, eq=False)
class ToyCase(PackCase):
    """A dump of numbers that should be 0, 1, 2, ...; counts how often a filling is asked."""

    asked: list[int]

    @property
    def right(self) -> Toy | None:
        return None if self.layout is None else self.toy(self.layout)

    @property
    def start(self) -> Toy:
        return self.right or self.toy(NO_ROWS)

    def toy(self, layout: PackedLayout) -> Toy:
        route = Recipe(placement=placed(layout), shift=Shift(by=0), cut=Cut(kind="whole"))
        return Toy(route=route, values=np.arange(layout.total, dtype=np.float64))

    def agrees(self, filled: Any, slots: Ints, actual: Values) -> Bools:
        self.asked.append(len(slots))
        return np.asarray(filled.values[slots] == actual)


def case_of(
    values: Sequence[float] | Values, *, fits: bool = True, slots: int = ROOM.slots, **more: Any
) -> ToyCase:
    """A dump of these values; its mismatches are counted."""
    dumped = np.asarray(values, dtype=np.float64)
    n = len(dumped)
    held = torch.from_numpy(dumped)
    return ToyCase(
        slots=Slots(
            pieces=[lambda a, b: held[a:b]],
            sizes=[n],
            decode=lambda found: np.asarray(found.numpy()),
            room=replace(ROOM, slots=slots),
        ),
        rows=np.array([0]),
        lengths=np.array([n]),
        width=n,
        layout=PackedLayout.from_cu_seqlens([0, n], [0, n]) if fits else None,
        geometry=PackGeometry(),
        whole=True,
        mismatches=int((dumped != np.arange(n)).sum()) if fits else 0,
        asked=[],
        **more,
    )


def changed(*slots: int, by: float = 1000.0) -> Build:
    """A fault that adds to what is in these slots."""

    def build(case: ToyCase, filled: Toy) -> Built:
        values = filled.values.copy()
        values[[slot for slot in slots if slot < len(values)]] += by
        return Built(filled=replace(filled, values=values))

    return build


def form(
    fault: str, *slots: int, axis: Axis = "shift", by: float = 1000.0, search: bool = False
) -> Form:
    return Form(fault=fault, axis=axis, build=changed(*slots, by=by), search=search)


def dump(n: int, *slots: int, by: float = 1000.0) -> list[float]:
    """0, 1, 2, ... with something added in some slots."""
    return [i + (by if i in slots else 0.0) for i in range(n)]


def names(found: Sequence[Explanation]) -> list[tuple[str, ...]]:
    return [entry.names for entry in found]


def test_nothing_is_looked_for_where_nothing_failed_or_nothing_was_dumped() -> None:
    right, empty = case_of(dump(8)), case_of([])
    assert right.mismatches == 0
    assert explain([right, empty], [form(FIRST, 1)]) == []
    assert right.asked == []
    assert explain([], [form(FIRST, 1)]) == []


def test_every_exact_fault_is_named_once_in_the_contracts_order_and_beats_a_likely_one() -> None:
    case = case_of(dump(8, 2, 5))
    nearly = form(THIRD, 2)
    found = explain([case], [form(SECOND, 2, 5), nearly, form(FIRST, 2, 5), form(FIRST, 5, 2)])
    assert names(found) == [(FIRST,), (SECOND,)]
    assert [(entry.explained, entry.total, entry.exact) for entry in found] == [(2, 2, True)] * 2


def test_a_fault_that_adds_or_leaves_a_single_mismatch_is_not_exact() -> None:
    case = case_of(dump(8, 2, 5))
    assert case.mismatches == 2
    assert explain([case], [form(FIRST, 2), form(SECOND, 2, 5, 6), form(THIRD, 2, 5, by=7.0)]) == []


def test_a_fault_must_explain_every_pack_also_those_past_the_screened_ones() -> None:
    packs = [case_of(dump(8, 3)) for _ in range(module.MOST_CASES)]
    also, other = case_of(dump(8, 3)), case_of(dump(8, 4))
    assert names(explain([*packs, also], [form(FIRST, 3)])) == [(FIRST,)]
    assert explain([*packs, other], [form(FIRST, 3)]) == []


def test_faults_are_screened_on_no_more_packs_than_said() -> None:
    packs = [case_of(dump(8, 3)) for _ in range(module.MOST_CASES + 1)]
    assert explain(packs, [form(FIRST, 4)]) == []
    assert [bool(pack.asked) for pack in packs] == [True] * module.MOST_CASES + [False]


def test_a_right_pack_speaks_against_a_fault_that_would_show_in_it() -> None:
    wrong, right = case_of(dump(8, 3)), case_of(dump(8))
    assert explain([wrong, right], [form(FIRST, 3)]) == []
    assert explain([right, wrong], [form(FIRST, 3)]) == []


def test_a_right_pack_that_has_no_room_for_a_fault_does_not_speak_against_it() -> None:
    wrong, right = case_of(dump(8, 3)), case_of(dump(4))

    def build(case: ToyCase, filled: Toy) -> Built | None:
        return None if case.width == 4 else changed(3)(case, filled)

    roomy = Form(fault=FIRST, axis="shift", build=build)
    for packs in ([wrong, right], [right, wrong]):
        found = explain(packs, [roomy])
        assert [(entry.names, entry.explained, entry.total) for entry in found] == [
            ((FIRST,), 1, 1)
        ]
    also_wrong = case_of(dump(4, 3))
    assert explain([wrong, also_wrong], [roomy]) == []
    screened = [case_of(dump(8, 3)) for _ in range(module.MOST_CASES)]
    assert explain([*screened, also_wrong], [roomy]) == []


def test_what_a_later_block_holds_counts_as_well() -> None:
    case = case_of(dump(64, 1, 60), slots=8)
    assert len(case.slots.blocks()) == 8
    assert names(explain([case], [form(FIRST, 1, 60)])) == [(FIRST,)]
    assert explain([case], [form(FIRST, 1)]) == []
    case = case_of(dump(64, 1, 60), slots=8, sample=np.arange(32))
    assert names(explain([case], [form(FIRST, 1, 60)])) == [(FIRST,)]
    assert explain([case], [form(FIRST, 1)]) == []


def test_two_faults_on_two_axes_explain_together_what_neither_does_alone() -> None:
    case = case_of(dump(12, 1, 2, 7, 8))
    one, other = form(SECOND, 1, 2), form(FIRST, 7, 8, axis="cut")
    found = explain([case], [one, other])
    assert names(found) == [(FIRST, SECOND)]
    assert found[0].exact
    assert found[0].rank == (0, 1)


def test_no_pair_is_made_on_one_axis_or_of_one_name_and_each_pair_is_named_once() -> None:
    case = case_of(dump(12, 1, 2, 7, 8))
    assert explain([case], [form(SECOND, 1, 2), form(FIRST, 7, 8)]) == []
    assert explain([case], [form(FIRST, 1, 2), form(FIRST, 7, 8, axis="cut")]) == []
    twice = [form(SECOND, 1, 2), form(SECOND, 2, 1), form(FIRST, 7, 8, axis="cut")]
    assert names(explain([case], twice)) == [(FIRST, SECOND)]


def test_a_pair_that_does_not_fit_does_not_end_the_search() -> None:
    case = case_of(dump(12, 1, 2, 7, 8))
    forms = [form(THIRD, 5, axis="token"), form(SECOND, 1, 2), form(FIRST, 7, 8, axis="cut")]
    assert names(explain([case], forms)) == [(FIRST, SECOND)]


def test_pairs_come_in_the_contracts_order() -> None:
    case = case_of(dump(12, 1, 2, 7, 8))
    forms = [form(THIRD, 1, 2), form(SECOND, 1, 2), form(FIRST, 7, 8, axis="cut")]
    assert names(explain([case], forms)) == [(FIRST, SECOND), (FIRST, THIRD)]


def test_three_mismatches_are_too_few_for_a_pair_and_four_are_enough() -> None:
    forms = [form(SECOND, 1), form(FIRST, 7, 8, axis="cut")]
    assert explain([case_of(dump(12, 1, 7, 8))], forms) == []
    forms = [form(SECOND, 1, 2), form(FIRST, 7, 8, axis="cut")]
    assert len(explain([case_of(dump(12, 1, 2, 7, 8))], forms)) == 1


def test_a_pair_must_explain_every_pack_whole() -> None:
    screened = [case_of(dump(12, 1, 2, 7, 8)) for _ in range(module.MOST_CASES)]
    forms = [form(SECOND, 1, 2), form(FIRST, 7, 8, axis="cut")]
    assert len(explain([*screened, case_of(dump(12, 1, 2, 7, 8))], forms)) == 1
    assert explain([*screened, case_of(dump(12, 1, 2, 7, 8, 9))], forms) == []


def test_a_searched_fault_is_made_after_the_other_one_and_beside_it_in_small_dumps_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(dump(12, 1, 2, 7, 8))
    seen: list[bool] = []

    def build(case: ToyCase, filled: Toy) -> Built | None:
        seen.append(bool(filled.values[1] == 1001))
        return changed(7, 8)(case, filled)

    searched = Form(fault=FIRST, axis="cut", build=build, search=True)
    assert names(explain([case], [searched, form(SECOND, 1, 2)])) == [(FIRST, SECOND)]
    assert seen[0] is False  # alone at first
    assert seen[1:]
    assert all(seen[1:])
    monkeypatch.setattr(module, "SEARCHABLE", 12)
    assert len(explain([case], [searched, form(SECOND, 1, 2)])) == 1
    monkeypatch.setattr(module, "SEARCHABLE", 11)
    assert explain([case], [searched, form(SECOND, 1, 2)]) == []
    both = [searched, form(SECOND, 1, 2), form(THIRD, 7, 8, axis="token")]
    assert names(explain([case], both)) == [(SECOND, THIRD)]
    plain = replace(searched, search=False)
    assert len(explain([case], [plain, form(SECOND, 1, 2)])) == 1


def test_no_pair_is_looked_for_where_no_layout_fits() -> None:
    fits = case_of(dump(12, 1, 2, 7, 8))
    none = case_of(dump(12, 1, 2, 7, 8), fits=False)
    with_layout = placing(12)
    forms = [
        replace(form(SECOND, 1, 2), build=then(with_layout, changed(1, 2))),
        form(FIRST, 7, 8, axis="cut"),
    ]
    assert len(explain([fits], forms)) == 1
    assert explain([fits, none], forms) == []


def placing(n: int) -> Build:
    """A fault that brings a layout of n slots of its own."""
    return lambda case, filled: Built(filled=case.toy(PackedLayout.from_cu_seqlens([0, n], [0, n])))


def then(first: Build, second: Build) -> Build:
    def build(case: ToyCase, filled: Toy) -> Built | None:
        made = first(case, filled)
        assert made is not None
        return second(case, made.filled)

    return build


def test_where_no_layout_fits_a_fault_brings_its_own_and_every_slot_counts() -> None:
    case = case_of(dump(6, 4), fits=False)
    own = Form(fault=FIRST, axis="placement", build=then(placing(6), changed(4)))
    found = explain([case], [own, form(SECOND)])
    assert names(found) == [(FIRST,)]
    assert (found[0].explained, found[0].total) == (6, 6)
    assert makes([own], case)
    wrong = replace(own, build=then(placing(6), changed(5)))
    assert explain([case], [wrong]) == []
    assert explain([case], [replace(own, build=placing(5))]) == []


def test_a_fault_is_likely_that_leaves_one_in_a_hundred_and_is_not_below() -> None:
    bad = tuple(range(100))
    case = case_of(dump(300, *bad))
    assert case.mismatches == 100
    found = explain([case], [form(FIRST, *bad[1:])])
    assert [(entry.names, entry.explained, entry.total) for entry in found] == [((FIRST,), 99, 100)]
    assert not found[0].exact
    assert explain([case], [form(FIRST, *bad[2:])]) == []
    few = case_of(dump(300, *bad[:99]))
    assert explain([few], [form(FIRST, *bad[1:99])]) == []


def test_a_likely_fault_adds_no_mismatch() -> None:
    bad = tuple(range(100))
    case = case_of(dump(300, *bad))
    assert explain([case], [form(FIRST, *bad[1:], 200)]) == []


def test_a_likely_fault_adds_no_mismatch_outside_the_sample_either() -> None:
    bad = tuple(range(300))
    case = case_of(dump(600, *bad), sample=np.arange(500))
    assert names(explain([case], [form(FIRST, *bad[1:])])) == [(FIRST,)]
    assert explain([case], [form(FIRST, *bad[1:], 550)]) == []


def of_width(width: int, *slots: int, others: Sequence[int] = ()) -> Form:
    """A fault that changes these slots of packs of one width, and others in all others."""
    change, other = changed(*slots), changed(*others)
    return Form(
        fault=FIRST,
        axis="shift",
        build=lambda case, filled: (change if case.width == width else other)(case, filled),
    )


def test_a_likely_fault_may_leave_the_one_mismatch_of_a_pack_and_adds_none_to_a_right_one() -> None:
    bad = tuple(range(200))
    much, one, right = case_of(dump(300, *bad)), case_of(dump(20, 5)), case_of(dump(20))
    found = explain([much, one], [of_width(300, *bad)])
    assert [(entry.explained, entry.total) for entry in found] == [(200, 201)]
    assert len(explain([much, right], [of_width(300, *bad[1:])])) == 1
    assert explain([much, right], [of_width(300, *bad[1:], others=[5])]) == []


def test_where_no_layout_fits_a_likely_fault_may_leave_a_slot_too() -> None:
    bad = tuple(range(100))
    much = case_of(dump(300, *bad))
    none = case_of(dump(20, 19), fits=False, sample=np.arange(10))

    def build(case: ToyCase, filled: Toy) -> Built | None:
        return changed(*bad)(case, filled) if case.width == 300 else placing(20)(case, filled)

    found = explain([much, none], [Form(fault=FIRST, axis="placement", build=build)])
    assert [(entry.explained, entry.total) for entry in found] == [(119, 120)]
    seen = case_of(dump(20, 9), fits=False, sample=np.arange(10))
    assert explain([much, seen], [Form(fault=FIRST, axis="placement", build=build)]) == []


def test_the_likely_fault_that_leaves_least_is_named_where_no_other_is_near() -> None:
    bad = tuple(range(400))
    case = case_of(dump(800, *bad))

    def found(*left: int) -> list[tuple[str, ...]]:
        forms = [
            form(name, *bad[count:]) for name, count in zip((SECOND, THIRD), left, strict=True)
        ]
        return names(explain([case], forms))

    assert found(1, 4) == [(SECOND,)]
    assert found(4, 1) == [(THIRD,)]
    assert found(2, 4) == []  # the second leaves as little again as the first leaves
    assert found(1, 2) == []
    assert found(1, 3) == [(SECOND,)]
    assert found(2, 2) == [(SECOND,), (THIRD,)]
    assert found(1, 5) == [(SECOND,)]  # 5 of 400 are too many to be likely at all


def test_of_likely_forms_of_one_fault_the_first_speaks_and_several_are_in_order() -> None:
    bad = tuple(range(100))
    case = case_of(dump(300, *bad))
    noted = [
        Form(fault=name, axis="shift", build=with_note(changed(*bad[1:]), note))
        for name, note in ((SECOND, "other"), (FIRST, "one"), (FIRST, "two"))
    ]
    found = explain([case], noted)
    assert [(entry.names, entry.note) for entry in found] == [
        ((FIRST,), "one"),
        ((SECOND,), "other"),
    ]


def with_note(build: Build, note: str) -> Build:
    def built(case: ToyCase, filled: Toy) -> Built | None:
        made = build(case, filled)
        return None if made is None else replace(made, note=note)

    return built


def test_likely_faults_sum_what_they_leave_over_all_packs() -> None:
    bad = tuple(range(150))
    two = [case_of(dump(300, *bad)), case_of(dump(300, *bad))]
    found = explain(two, [form(FIRST, *bad[1:])])
    assert [(entry.explained, entry.total) for entry in found] == [(298, 300)]
    found = explain([two[0], case_of(dump(300, *bad[1:]))], [form(FIRST, *bad[1:])])
    assert [(entry.explained, entry.total) for entry in found] == [(298, 299)]


def test_a_likely_fault_is_held_to_all_slots_where_the_sample_shows_no_mismatch_left() -> None:
    bad = tuple(range(200))
    sample = np.arange(100, 300)
    for extra, expected in ((1, [(FIRST,)]), (3, [])):
        case = case_of(dump(300, *bad), sample=sample)
        assert names(explain([case], [form(FIRST, *bad[extra:])])) == expected


def test_the_whole_sample_is_looked_at_and_not_only_the_first_of_it() -> None:
    n = 3000
    case = case_of(dump(n, *range(0, n, 2)))
    assert n > 2 * module.FIRST_SCREEN
    adds = form(FIRST, *range(0, n, 2), 1501)
    assert explain([case], [adds]) == []
    assert [case.asked[0], case.asked[2]] == [n, n]  # which are wrong, and all after the first few
    assert len(case.asked) == 3  # nothing more is read of a dump that the sample speaks against


def test_a_wrong_fault_is_turned_down_after_the_first_few_slots() -> None:
    n = 4000
    case = case_of(dump(n, *range(0, n, 2)))
    assert explain([case], [form(FIRST, 1)]) == []
    assert case.asked[0] == n  # which are wrong
    assert case.asked[1:]
    for asked in case.asked[1:]:
        assert module.FIRST_SCREEN <= asked <= 1.2 * module.FIRST_SCREEN


def test_a_few_mismatches_that_are_left_do_not_turn_a_fault_down() -> None:
    bad = tuple(range(300))
    case = case_of(dump(600, *bad), sample=np.array([0, 1, 200, 250, 299, 400]))
    assert names(explain([case], [form(FIRST, *bad[2:])])) == [(FIRST,)]
    case = case_of(dump(600, *bad), sample=np.array([0, 1, 2, 250, 299, 400]))
    assert explain([case], [form(FIRST, *bad[3:])]) == []  # three of five


def test_of_a_hundred_mismatches_in_the_sample_five_may_be_left() -> None:
    bad = tuple(range(600))
    for left, expected in ((5, [(FIRST,)]), (6, [])):
        sample = np.concatenate([np.arange(left), np.arange(100, 200 - left)])
        case = case_of(dump(1200, *bad), sample=sample)
        assert len(sample) == 100
        assert names(explain([case], [form(FIRST, *bad[left:])])) == expected


def test_notes_are_joined_and_the_first_pack_that_has_one_speaks() -> None:
    case = case_of(dump(12, 1, 2, 7, 8))
    one = Form(fault=FIRST, axis="shift", build=with_note(changed(1, 2), "one"))
    two = Form(fault=SECOND, axis="cut", build=with_note(changed(7, 8), "two"))
    assert explain([case], [one, two])[0].note == "one; two"
    assert explain([case], [one, replace(two, build=changed(7, 8))])[0].note == "one"
    numbered = Form(
        fault=FIRST,
        axis="shift",
        build=lambda case, filled: with_note(changed(1), "first" if case.width == 8 else "later")(
            case, filled
        ),
    )
    packs = [case_of(dump(8, 1)), case_of(dump(9, 1))]
    assert explain(packs, [numbered])[0].note == "first"


def test_what_was_kept_of_the_dump_is_let_go_at_the_end() -> None:
    case = case_of(dump(8, 3))
    case.slots.take(np.array([0]))
    assert case.slots._kept is not None
    diagnose([case], [form(FIRST, 3)])
    assert case.slots._kept is None


def test_forms_make_a_dump_or_miss_it_by_one_slot_of_the_last_block() -> None:
    case = case_of(dump(64, 60), slots=8)
    assert makes([form(FIRST, 60)], case)
    assert not makes([form(FIRST, 59)], case)
    assert not makes([], case)
    assert not makes([Form(fault=FIRST, axis="cut", build=lambda case, filled: None)], case)


def test_a_sample_is_all_slots_of_a_small_dump_and_few_of_a_large_one() -> None:
    assert default_sample(10, 10).tolist() == list(range(10))
    some = default_sample(1000, 10)
    assert some.tolist() == default_sample(1000, 10).tolist()
    assert 5 < len(some) <= 10
    assert (np.diff(some) > 0).all()
    assert 0 <= some.min() < some.max() < 1000
    assert len(default_sample(4096)) == 4096
    assert len(default_sample(4097)) < 4097
    assert default_sample(0).tolist() == []


def test_a_diagnosis_says_what_the_registry_says_with_the_note_and_the_share() -> None:
    first, second = faults()[FIRST], faults()[SECOND]
    one = Explanation(forms=(form(FIRST),), note="a note", explained=4, total=4)
    made = as_diagnosis(one)
    assert (made.fault, made.match, made.score, made.faults) == (FIRST, "exact", None, ())
    assert made.message == f"{first.statement.rstrip('.')} (a note)"
    assert made.fix == first.fix
    assert as_diagnosis(replace(one, note="")).message == first.statement.rstrip(".")
    likely = as_diagnosis(replace(one, explained=3))
    assert (likely.match, likely.score) == ("likely", 0.75)
    pair = as_diagnosis(replace(one, forms=(form(SECOND), form(FIRST))))
    assert (pair.fault, pair.faults) == (FIRST, (FIRST, SECOND))
    assert pair.message.startswith(f"{first.statement.rstrip('.')}; and ")
    assert {*pair.fix.split()} == {*f"{first.fix} {second.fix}".split()}


def test_diagnoses_are_the_explanations_in_words() -> None:
    found = diagnose([case_of(dump(8, 3))], [form(SECOND, 3), form(FIRST, 3)])
    assert [(entry.fault, entry.match) for entry in found] == [(FIRST, "exact"), (SECOND, "exact")]
