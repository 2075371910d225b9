"""Which known fault makes what was dumped: each is screened on a sample, survivors on it all.

Nothing here knows what a mask is. A case says what a fault would make; a fault is *exact*
when that equals the dump everywhere, *likely* when it explains at least 99 % of the
mismatches and adds none, and is not named otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from opdtool.checks.hypotheses import Built, Form, PackCase
from opdtool.checks.masks_sample import SCREENED
from opdtool.checks.recipes import Bools, Ints
from opdtool.checks.recipes_values import Values
from opdtool.checks.registry import faults
from opdtool.findings import Diagnosis

LIKELY = 0.99
"""The share of the mismatches that a likely fault explains."""
FIRST_SCREEN = 384
"""Slots on which every fault is tried before it is tried on the whole sample."""
LEAST_FOR_PAIR = 4
"""Fewer mismatches than this are explained by one fault or not at all: among all pairs one
that happens to fit a few slots is always found."""
MOST_CASES = SCREENED
"""How many packs faults are screened on; all of them are asked before one is named."""
SEARCHABLE = 1 << 21
"""Above this many slots, a fault that has to be searched for is not tried beside another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One fault, or two at once, and how much of the mismatches they explain."""

    forms: tuple[Form, ...]
    note: str
    explained: int
    total: int

    @property
    def names(self) -> tuple[str, ...]:
        """The faults' names, in the order in which they are listed."""
        return tuple(sorted((form.fault for form in self.forms), key=fault_order))

    @property
    def exact(self) -> bool:
        """Whether nothing is left unexplained."""
        return self.explained == self.total

    @property
    def rank(self) -> tuple[int, ...]:
        """Sorts by contract section 7."""
        return tuple(fault_order(name) for name in self.names)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Screen:
    """A case's sample: the slots, what is there, and which are mismatches."""

    case: PackCase
    slots: Ints
    actual: Values
    wrong: Bools
    quick: Ints


def fault_order(name: str) -> int:
    """The place of a fault in contract section 7."""
    return list(faults()).index(name)


def diagnose(cases: Sequence[PackCase], forms: Sequence[Form]) -> tuple[Diagnosis, ...]:
    """The faults that explain a failure of these packs together, the simplest first."""
    return tuple(as_diagnosis(entry) for entry in explain(cases, forms))


def explain(cases: Sequence[PackCase], forms: Sequence[Form]) -> list[Explanation]:
    """The explanations behind :func:`diagnose`: all exact ones, else pairs, else a likely one."""
    try:
        return _explained(cases, forms)
    finally:
        for case in cases:
            case.slots.forget()


def _explained(cases: Sequence[PackCase], forms: Sequence[Form]) -> list[Explanation]:
    failing = [
        case for case in cases if case.slots.total and (case.mismatches or case.layout is None)
    ]
    if not failing:
        return []
    screens = [_screen(case) for case in failing[:MOST_CASES]]
    exact: dict[str, Explanation] = {}
    likely: list[tuple[Form, ...]] = []
    for form in sorted(forms, key=lambda form: fault_order(form.fault)):
        verdict = None if form.fault in exact else _passes((form,), screens)
        if verdict is None:
            continue
        found = _confirm((form,), cases, stop_at=0) if verdict == "exact" else None
        if found is not None and found.exact:
            exact[form.fault] = found
        else:
            likely.append((form,))
    if exact:
        return sorted(exact.values(), key=lambda entry: entry.rank)
    mismatches = sum(case.mismatches for case in cases)
    if mismatches >= LEAST_FOR_PAIR and all(case.layout is not None for case in cases):
        pairs = list(_exact_pairs(cases, forms, screens))
        if pairs:
            return sorted(pairs, key=lambda entry: entry.rank)
    return _nearest(likely, cases, mismatches)


def _exact_pairs(
    cases: Sequence[PackCase], forms: Sequence[Form], screens: Sequence[_Screen]
) -> Iterator[Explanation]:
    """Two faults on two axes that together make the dump; each pair of names once."""
    named: set[tuple[str, ...]] = set()
    small = sum(case.slots.total for case in cases) <= SEARCHABLE
    for pair in combinations(forms, 2):
        names = tuple(sorted(form.fault for form in pair))
        if pair[0].axis == pair[1].axis or names[0] == names[1] or names in named:
            continue
        if any(form.search for form in pair) and not small:
            continue
        # A fault that is searched for is searched beside the other one.
        ordered = tuple(sorted(pair, key=lambda form: form.search))
        if _passes(ordered, screens) != "exact":
            continue
        found = _confirm(ordered, cases, stop_at=0)
        if found is not None and found.exact:
            named.add(names)
            yield found


def _nearest(
    candidates: Iterable[tuple[Form, ...]], cases: Sequence[PackCase], mismatches: int
) -> list[Explanation]:
    """The likely faults: those that leave the least, where no other leaves nearly as little."""
    allowed = int(mismatches * (1 - LIKELY))
    if allowed == 0:
        return []
    found = [_confirm(forms, cases, stop_at=allowed) for forms in candidates]
    near = [entry for entry in found if entry is not None]
    if not near:
        return []
    most = max(entry.explained for entry in near)
    left = mismatches - most
    if any(0 < most - entry.explained <= left for entry in near):
        return []
    best: dict[str, Explanation] = {}
    for entry in near:
        if entry.explained == most:
            best.setdefault(entry.names[0], entry)
    return sorted(best.values(), key=lambda entry: entry.rank)


def _screen(case: PackCase) -> _Screen:
    slots = case.sample if case.sample is not None else default_sample(case.slots.total)
    actual = case.slots.take(slots)
    right = case.right
    wrong = np.zeros(len(slots), np.bool_)
    if right is not None:
        wrong = ~case.agrees(right, slots, actual)
    spread = np.flatnonzero(wrong)
    step = max(1, len(spread) // (FIRST_SCREEN // 2))
    rest = np.flatnonzero(~wrong)
    other = rest[:: max(1, len(rest) // (FIRST_SCREEN // 2))]
    quick = np.sort(np.concatenate([spread[::step], other]))
    return _Screen(case=case, slots=slots, actual=actual, wrong=wrong, quick=quick)


def default_sample(total: int, count: int = 4096) -> Ints:
    """Slots spread at random over a dump, sorted, the same on every run."""
    if total <= count:
        return np.arange(total, dtype=np.int64)
    return np.unique(np.random.default_rng(17).integers(total, size=count, dtype=np.int64))


def _built(forms: Sequence[Form], case: PackCase) -> Built | None:
    """The case's right filling with the forms' changes made, one after the other."""
    filled: Any = case.start
    notes = []
    for form in forms:
        made = form.build(case, filled)
        if made is None:
            return None
        filled = made.filled
        notes.append(made.note)
    if filled.route.placement.layout.total != case.slots.total:
        return None  # where no layout fits, only a fault that brings its own can be made
    return Built(filled=filled, note="; ".join(note for note in notes if note))


def _passes(forms: Sequence[Form], screens: Sequence[_Screen]) -> str | None:
    """``exact`` or ``likely`` as far as the samples say; None for a fault that is neither."""
    verdict = "exact"
    for screen in screens:
        made = _built(forms, screen.case)
        if made is None:
            return None
        for part in (screen.quick, slice(None)):
            agree = screen.case.agrees(made.filled, screen.slots[part], screen.actual[part])
            wrong = screen.wrong[part]
            if not agree[~wrong].all():
                return None
            unexplained = int((~agree[wrong]).sum())
            if unexplained > 0.03 * wrong.sum() + 2:
                return None
            if unexplained:
                verdict = "likely"
    return verdict


def _confirm(
    forms: Sequence[Form], cases: Sequence[PackCase], *, stop_at: int
) -> Explanation | None:
    """What the forms explain of all packs; None once they add a mismatch, or leave more than
    ``stop_at``."""
    total = left = 0
    note = ""
    for case in cases:
        made = _built(forms, case)
        if made is None:
            if case.mismatches or case.layout is None:
                return None
            continue  # a fault that this pack has no room for
        note = note or made.note
        right = case.right
        for start, stop in case.slots.blocks():
            slots = np.arange(start, stop, dtype=np.int64)
            actual = case.slots.read(start, stop)
            agree = case.agrees(made.filled, slots, actual)
            if right is None:
                wrong = np.ones(len(slots), np.bool_)
            elif case.mismatches == 0:
                wrong = np.zeros(len(slots), np.bool_)
            elif agree.all():
                continue  # whatever is wrong here is explained; all of it is counted below
            elif stop_at == 0:
                return None
            else:
                wrong = ~case.agrees(right, slots, actual)
            if not agree[~wrong].all():
                return None
            left += int((~agree[wrong]).sum())
            if left > stop_at:
                return None
        total += case.slots.total if right is None else case.mismatches
    explained = total - left
    return Explanation(forms=tuple(forms), note=note, explained=explained, total=total)


def makes(forms: Sequence[Form], case: PackCase) -> bool:
    """Whether the forms make all of what a case's dump holds."""
    made = _built(forms, case)
    if made is None:
        return False
    for start, stop in case.slots.blocks():
        slots = np.arange(start, stop, dtype=np.int64)
        if not case.agrees(made.filled, slots, case.slots.read(start, stop)).all():
            return False
    return True


def as_diagnosis(entry: Explanation) -> Diagnosis:
    """An explanation in the words of the registry."""
    infos = [faults()[name] for name in entry.names]
    message = "; and ".join(_sentence(info.statement) for info in infos)
    if entry.note:
        message += f" ({entry.note})"
    return Diagnosis(
        fault=entry.names[0],
        match="exact" if entry.exact else "likely",
        message=message,
        fix=" ".join(dict.fromkeys(info.fix for info in infos)),
        score=None if entry.exact else entry.explained / entry.total,
        faults=entry.names if len(entry.names) > 1 else (),
    )


def _sentence(text: str) -> str:
    return text.rstrip(".")
