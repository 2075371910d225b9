"""What checks find and what reports say: plain frozen values, no torch, no printing.

A check makes a :class:`Finding`; a command gathers findings, a diagnosis, statistics and
pictures into one :class:`Report`; ``opdtool.report`` draws a report in every format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "opdtool.report/1"
MAX_PLACES = 10
"""How many places of a mismatch are shown; the rest are counted."""

Status = Literal["pass", "fail", "warn", "skip"]
Match = Literal["exact", "likely"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check on one tensor.

    ``first`` holds up to :data:`MAX_PLACES` places, each a flat mapping such as
    ``{"sequence": 3, "position": 17, "slot": 812, "cp_rank": 0, "expected": 1.0,
    "actual": 0.0}``; ``mismatches`` counts all of them out of ``total``.
    A ``skip`` says in ``message`` why it was skipped. ``step`` is the step of a suite that
    the finding came from.
    """

    code: str
    name: str
    status: Status
    message: str
    tensor: str | None = None
    mismatches: int | None = None
    total: int | None = None
    first: tuple[Mapping[str, Scalar], ...] = ()
    step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A known fault that explains a failure.

    ``match`` is ``exact`` when the tensor that the fault makes equals the dump (or, for a
    fault that is a property, when the property holds), ``likely`` with a ``score`` in
    [0.99, 1] when it is the nearest by far. Two faults at once are in ``faults``.
    """

    fault: str
    match: Match
    message: str
    fix: str
    score: float | None = None
    faults: tuple[str, ...] = ()
    step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table to draw. Cells are already text; ``numeric`` names right-aligned columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A bar chart: one labelled value in [0, limit] a bar (utilisation, coverage, histograms)."""

    title: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    limit: float
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Expected over actual for a run of slots of one sequence, so that one sees the shift.

    Every row has a label and one short text a slot; ``wrong`` holds the column indices
    that differ.
    """

    title: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    wrong: frozenset[int] = frozenset()


Section = Table | Bars | Strip


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a command has to say. The exit status follows from the findings alone.

    ``stats`` is JSON-able and goes into every machine format; ``sections`` are pictures for
    people; ``notes`` are plain lines (what was written, what to look at).
    """

    command: str
    geometry: Mapping[str, Scalar] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    diagnosis: tuple[Diagnosis, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True when no check failed. Warnings and skips do not fail."""
        return all(finding.status != "fail" for finding in self.findings)

    @property
    def summary(self) -> dict[str, int]:
        """How many findings have each status."""
        words = {"pass": "passed", "fail": "failed", "warn": "warned", "skip": "skipped"}
        counts = dict.fromkeys(words.values(), 0)
        for finding in self.findings:
            counts[words[finding.status]] += 1
        return counts

    @property
    def nothing_checked(self) -> bool:
        """True when findings were asked for and every one of them was skipped."""
        return all(finding.status == "skip" for finding in self.findings)
