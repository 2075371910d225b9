"""Known faults of where rows lie and how ranks cut them, for every packed tensor alike.

In the order of contract section 7. What each makes, to the slot, is stated there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from opdtool.checks.faults_search import (
    permuted_and_laid_out,
    permuted_rows,
    swapped_ranks,
    with_tail,
)
from opdtool.checks.hypotheses import Build, Built, Form, PackCase, cut_by, placed_by
from opdtool.checks.layout_multiples import absorbed_tail
from opdtool.checks.recipes import After, AfterKind, Cut, CutKind, Ints, Shift, placed
from opdtool.checks.recipes import placed_unpadded as lay_unpadded
from opdtool.core.layout import PackedLayout

MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Padding multiples that stacks have used."""


def placement_forms() -> Iterator[Form]:
    """Rows in the wrong places."""
    yield Form(fault="laid-out-unpadded", axis="placement", build=_unpadded)
    yield Form(fault="rows-permuted", axis="placement", build=permuted_rows, search=True)
    yield Form(fault="rows-permuted", axis="placement", build=permuted_and_laid_out, search=True)
    yield Form(fault="left-padded-rows", axis="placement", build=_left_padded)
    yield Form(fault="left-padded-rows", axis="placement", build=_left_padded_in_width)
    yield Form(fault="lengths-off-by-one", axis="placement", build=_one_shorter)
    yield Form(fault="lengths-off-by-one", axis="placement", build=_one_shorter_laid_out)
    for whole in (False, True):
        yield Form(fault="tail-not-clamped", axis="placement", build=_tail_filled(whole))
    yield Form(fault="cu-seqlens-padded-twice", axis="placement", build=_padded_as_real)
    for multiple in MULTIPLES:
        yield Form(fault="padding-multiple-wrong", axis="placement", build=_padded_to(multiple))


def _placement(build: Callable[[PackCase, PackedLayout], Ints | None], part: str) -> Build:
    """A build that replaces one part of the right placement."""

    def built(case: PackCase, filled: Any) -> Built | None:
        if case.layout is None:
            return None
        found = build(case, case.layout)
        if found is None:
            return None
        return Built(filled=placed_by(filled, placed(case.layout, **{part: found})))

    return built


def _unpadded(case: PackCase, filled: Any) -> Built | None:
    if case.layout is None:
        return None
    return Built(filled=placed_by(filled, lay_unpadded(case.layout)))


def _left_padded(case: PackCase, filled: Any) -> Built | None:
    if case.layout is None:
        return None
    lead = case.layout.padded_lengths - case.layout.lengths
    return Built(filled=placed_by(filled, placed(case.layout, lead=lead)))


def _left_padded_in_width(case: PackCase, filled: Any) -> Built | None:
    if case.layout is None:
        return None
    length = case.layout.lengths
    place = placed(case.layout, lead=case.width - length, stop=length)
    return Built(filled=placed_by(filled, place), note="each row was right-aligned in the batch")


_one_shorter = _placement(lambda case, right: np.maximum(right.lengths - 1, 0), "length")
_padded_as_real = _placement(
    lambda case, right: np.minimum(right.padded_lengths, case.width), "length"
)


def _one_shorter_laid_out(case: PackCase, filled: Any) -> Built | None:
    return _laid_out(case, filled, np.maximum(case.lengths - 1, 0))


def _laid_out(case: PackCase, filled: Any, lengths: Ints) -> Built | None:
    """Rows of other lengths in the layout of those lengths, where it has the dump's slots."""
    padded = case.geometry.padded(lengths)
    total = int(padded.sum())
    try:
        filled_up = case.geometry.padded_total(total)
    except ValueError:
        return None
    if case.slots.total not in (total, filled_up):
        return None
    layout = with_tail(case, lengths, padded, case.rows)
    return None if layout is None else Built(filled=placed_by(filled, placed(layout)))


def tail_start(case: PackCase, whole: bool) -> tuple[int, int, int] | None:
    """(segment, first, stop): the last row's segment and the positions in it that an absorbed
    tail takes up: from its alignment on, or with ``whole`` from its last token on."""
    if case.layout is None or case.layout.num_rows == 0:
        return None
    layout, last = case.layout, case.layout.num_rows - 1
    length, stop = int(layout.lengths[last]), int(layout.padded_lengths[last])
    tail = absorbed_tail(layout.lengths[: last + 1], layout.padded_lengths, case.geometry)
    return (last, length if whole else stop - tail, stop) if tail else None


def _tail_filled(whole: bool) -> Build:
    def built(case: PackCase, filled: Any) -> Built | None:
        tail = tail_start(case, whole)
        if tail is None or case.layout is None:
            return None
        last, first, stop = tail
        length = case.layout.lengths.copy()
        length[last] = min(stop if whole else length[last] + stop - first, case.width)
        return Built(filled=placed_by(filled, placed(case.layout, length=length)))

    return built


def _padded_to(multiple: int) -> Build:
    def built(case: PackCase, filled: Any) -> Built | None:
        padded = -(-case.lengths // multiple) * multiple
        if case.layout is None and not (padded % case.geometry.sequence_multiple).any():
            return None  # as the geometry wants it: something else is wrong
        layout = with_tail(case, case.lengths, padded, case.rows)
        if layout is None or (
            case.layout is not None
            and np.array_equal(layout.cu_seqlens_padded, case.layout.cu_seqlens_padded)
        ):
            return None
        note = f"the content is padded to multiples of {multiple}"
        return Built(filled=placed_by(filled, placed(layout)), note=note)

    return built


def cut_forms() -> Iterator[Form]:
    """Ranks that hold the wrong slots."""
    yield Form(fault="cp-contiguous", axis="cut", build=_cut("contiguous"))
    yield Form(fault="cp-rank-swapped", axis="cut", build=swapped_ranks, search=True)
    yield Form(fault="cp-split-whole-pack", axis="cut", build=_cut("pack-zigzag"))
    yield Form(fault="cp-split-whole-pack", axis="cut", build=_cut("pack-contiguous"))


def late_rolls(fault: str, by: int) -> Iterator[Form]:
    """The roll made on the rank's own piece, after the cut."""
    kinds: tuple[AfterKind, ...] = ("segment", "segment-circular", "rank", "rank-circular")
    for kind in kinds:
        yield Form(fault=fault, axis="shift", build=_late_roll(After(kind=kind, by=by)))


def _late_roll(after: After) -> Build:
    def built(case: PackCase, filled: Any) -> Built | None:
        if case.whole or case.geometry.cp_size == 1:
            return None
        route = replace(filled.route, shift=Shift(by=0), after=after)
        return Built(filled=replace(filled, route=route))

    return built


def _cut(kind: CutKind) -> Build:
    notes = {
        "contiguous": "rank r holds the r-th contiguous piece of each sequence",
        "pack-zigzag": "the zig-zag windows were cut from the whole pack",
        "pack-contiguous": "contiguous pieces were cut from the whole pack",
    }

    def built(case: PackCase, filled: Any) -> Built | None:
        if case.whole or case.geometry.cp_size == 1:
            return None
        return Built(filled=cut_by(filled, Cut(kind=kind)), note=notes[kind])

    return built
