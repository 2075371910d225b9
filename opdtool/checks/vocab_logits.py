"""Recorded draft logits against the teacher's columns: values, places, and known mistakes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from opdtool.checks.registry import check_name, faults
from opdtool.core.vocab import integers
from opdtool.findings import MAX_PLACES, Diagnosis, Finding, Scalar

Place = tuple[int, int, int, float, float]
"""Sequence, position, draft id, expected, actual."""


@dataclass(slots=True)
class Tally:
    """What was compared so far. Tallies of ranks and of blocks are added with :meth:`merge`."""

    total: int = 0
    mismatches: int = 0
    greatest: float = 0.0
    first: list[Place] = field(default_factory=list)

    def merge(self, other: Tally) -> None:
        """Take in what another one compared."""
        self.total += other.total
        self.mismatches += other.mismatches
        self.greatest = max(self.greatest, other.greatest)
        self.first = sorted([*self.first, *other.first])[:MAX_PLACES]


def differs(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> Tensor:
    """Where |actual - expected| > atol + rtol * |expected|; equal infinities agree, NaN never."""
    wide, reference = actual.to(torch.float64), expected.to(torch.float64)
    near = (wide - reference).abs() <= atol + rtol * reference.abs()
    finite = torch.isfinite(reference)
    return ~((wide == reference) | (near & finite))


def compare_block(
    mapped: Tensor,
    reference: Tensor,
    *,
    rtol: float,
    atol: float,
    corner: tuple[int, int, int],
) -> Tally:
    """A block [b, s, d] of mapped logits against the same block of the reference.

    ``corner`` is the sequence, position and draft id of its first element. The recorded value
    is the actual one: it is what is under test.
    """
    wrong = differs(reference, mapped, rtol, atol)
    found = Tally(total=mapped.numel(), mismatches=int(wrong.sum()))
    if not found.mismatches:
        return found
    error = (reference.to(torch.float64) - mapped.to(torch.float64)).abs()
    found.greatest = float(error.nan_to_num(nan=float("inf")).max())
    for at in wrong.nonzero()[:MAX_PLACES].tolist():
        b, s, d = at
        place = tuple(start + step for start, step in zip(corner, at, strict=True))
        found.first.append((*place, float(mapped[b, s, d]), float(reference[b, s, d])))
    return found


def draft_logits_finding(tally: Tally, rtol: float, atol: float) -> Finding:
    """The check that recorded draft logits are the teacher's columns."""
    bound = "equal" if rtol == atol == 0 else f"within atol {atol:g} + rtol {rtol:g}"
    if tally.mismatches:
        message = f"greatest error {tally.greatest:g}; values must be {bound}"
    else:
        message = f"all {tally.total:,} values are {bound}"
    names = ("sequence", "position", "draft_id", "expected", "actual")
    places: list[dict[str, Scalar]] = [dict(zip(names, at, strict=True)) for at in tally.first]
    return Finding(
        code="OPD418",
        name=check_name("OPD418"),
        status="fail" if tally.mismatches else "pass",
        message=message,
        tensor="teacher_logits",
        mismatches=tally.mismatches,
        total=tally.total,
        first=tuple(places),
    )


def wrong_columns(d2t: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The columns [D] that each misreading of the map picks, where it can be and differs."""
    offsets = integers("d2t", d2t)
    D = torch.arange(len(offsets))
    right = D + offsets
    misread = {"d2t-absolute": offsets, "d2t-all-zero": D, "d2t-arange": 2 * D}
    return {
        fault: ids
        for fault, ids in misread.items()
        if int(ids.min()) >= 0 and int(ids.max()) < vocab_size and not torch.equal(ids, right)
    }


_SAID = {
    "d2t-absolute": "the recorded logits are the teacher's columns d2t[i]: offsets read as ids",
    "d2t-all-zero": "the recorded logits are the teacher's first columns, as if d2t were zero",
    "d2t-arange": "the recorded logits are the teacher's columns 2i, as if d2t[i] were i",
}


def misreadings(names: list[str]) -> list[Diagnosis]:
    """The diagnosis for misreadings of a map that make exactly what was recorded."""
    return [
        Diagnosis(fault=name, match="exact", message=_SAID[name], fix=faults()[name].fix)
        for name in names
    ]
