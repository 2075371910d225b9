"""The known faults of masks, each as one or more forms: changes on one axis of a filled.

In the order of contract section 7. What each makes, to the slot, is stated there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opdtool.checks.faults_places import cut_forms, late_rolls, placement_forms, tail_start
from opdtool.checks.hypotheses import Build, Built, Form, PackCase, shifted
from opdtool.checks.recipes import Shift


def mask_forms(shift: int) -> tuple[Form, ...]:
    """Every form of every fault of a mask whose slot t should speak of token ``t + shift``."""
    return (
        *_shift_forms(shift),
        *_value_forms(shift),
        *placement_forms(),
        *_tail_forms(),
        *late_rolls("mask-rolled-after-cp-cut", shift or 1),
        *cut_forms(),
    )


def _shift_forms(shift: int) -> Iterator[Form]:
    if shift == 0:
        for kind in ("segment", "segment-circular", "pack-circular"):
            yield Form(fault="mask-shifted", axis="shift", build=_shift(Shift(kind=kind, by=1)))
        yield Form(fault="mask-shifted-right", axis="shift", build=_shift(Shift(by=-1)))
        yield Form(fault="mask-shifted-twice", axis="shift", build=_shift(Shift(by=2)))
        return
    yield from _shifts("mask-not-shifted", shift, 0, shift - 1)
    yield from _shifts("mask-shifted-right", shift, -shift, -1)
    yield from _shifts("mask-shifted-twice", shift, 2 * shift, shift + 1)
    leak = Shift(kind="pack-circular", by=shift)
    yield Form(fault="mask-leaks-across-boundary", axis="shift", build=_shift(leak))
    wrap = Shift(kind="segment-circular", by=shift)
    yield Form(fault="mask-wraps-within-segment", axis="shift", build=_shift(wrap))


def _shifts(fault: str, right: int, *wrong: int) -> Iterator[Form]:
    for by in dict.fromkeys(wrong):
        note = f"the slots speak of token t{by:+d} instead of t{right:+d}" if right > 1 else ""
        yield Form(fault=fault, axis="shift", build=_shift(Shift(by=by), note))


def _shift(shift: Shift, note: str = "") -> Build:
    return lambda case, filled: Built(filled=shifted(filled, shift), note=note)


def _value_forms(shift: int) -> Iterator[Form]:
    if shift:
        yield Form(fault="mask-last-slot-kept", axis="overlay", build=_with(overlay="last-slot"))
    yield Form(fault="sample-mask-ignored", axis="sample", build=_with(sample=False))
    yield Form(fault="prompt-not-masked", axis="token", build=_with(token="ones"))
    yield Form(fault="mask-covers-padding", axis="overlay", build=_with(overlay="padding"))
    yield Form(fault="mask-inverted", axis="overlay", build=_with(overlay="inverse"))
    yield Form(fault="mask-inverted", axis="token", build=_with(token="inverse"))


def _with(**changes: object) -> Build:
    return lambda case, filled: Built(filled=replace(filled, **changes))


def _tail_forms() -> Iterator[Form]:
    for whole in (False, True):
        for ahead in (0, 1):
            yield Form(fault="tail-not-clamped", axis="overlay", build=_tail_ones(whole, ahead))


def _tail_ones(whole: bool, ahead: int) -> Build:
    def built(case: PackCase, filled: Any) -> Built | None:
        tail = tail_start(case, whole)
        if tail is None:
            return None
        window = (tail[1] - ahead, tail[2] - ahead)
        return Built(filled=replace(filled, overlay="tail", tail=window))

    return built
