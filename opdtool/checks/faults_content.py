"""The known faults of a pack's content, each as forms: changes on one axis of a filling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from opdtool.checks.content import Kind, Run
from opdtool.checks.faults_places import cut_forms, late_rolls, placement_forms
from opdtool.checks.hypotheses import Build, Built, Form, shifted
from opdtool.checks.recipes import Shift, ShiftKind

OF_POSITIONS = ("laid-out-unpadded", "padding-multiple-wrong")
"""Faults of placement that show in positions, which are the same whatever row is there."""


def content_forms(kind: Kind) -> tuple[Form, ...]:
    """Every form of every fault that a tensor of this kind can have."""
    if kind == "positions":
        places = [form for form in placement_forms() if form.fault in OF_POSITIONS]
        return (*places, *cut_forms(), *_runs())
    if kind == "targets":
        late = late_rolls("targets-rolled-after-cp-cut", 1)
        return (*placement_forms(), *late, *cut_forms(), *_shifts())
    return (*placement_forms(), *cut_forms())


def _runs() -> Iterator[Form]:
    yield Form(fault="positions-not-restarted", axis="overlay", build=_run("pack"))
    yield Form(fault="positions-not-restarted", axis="overlay", build=_run("rank"))


def _run(run: Run) -> Build:
    notes = {
        "pack": "0 to T-1 over the whole pack",
        "rank": "0 to T/CP-1 on every rank",
        "restart": "",
    }
    return lambda case, filled: Built(filled=replace(filled, run=run), note=notes[run])


def _shifts() -> Iterator[Form]:
    kinds: tuple[ShiftKind, ...] = ("segment", "segment-circular", "pack-circular")
    for fault, by in (
        ("targets-not-shifted", 0),
        ("targets-shifted-right", -1),
        ("targets-shifted-twice", 2),
    ):
        for kind in kinds if by else kinds[:1]:
            yield Form(fault=fault, axis="shift", build=_shift(Shift(kind=kind, by=by)))
    leak = Shift(kind="pack-circular", by=1)
    yield Form(fault="targets-cross-boundary", axis="shift", build=_shift(leak))


def _shift(shift: Shift) -> Build:
    return lambda case, filled: Built(filled=shifted(filled, shift))
