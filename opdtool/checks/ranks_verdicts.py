"""The equivalence suite's counts: what was compared, what differs, and the first places.

Every verdict counts the values it compared, so that a check that looked at nothing is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from opdtool.checks.ranks_reference import Array
from opdtool.checks.registry import check_name, checks
from opdtool.findings import MAX_PLACES, Finding, Scalar, Table


@dataclass(slots=True)
class Verdict:
    """One check's count over everything it was asked: per geometry, and the first places."""

    compared: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    places: list[dict[str, Scalar]] = field(default_factory=list)

    def add(
        self, geometry: str, bad: Array, place: dict[str, Scalar], expected: Array, actual: Array
    ) -> None:
        """Count a comparison; ``bad`` says element by element what is wrong."""
        self.compared[geometry] = self.compared.get(geometry, 0) + bad.size
        where = np.flatnonzero(bad)
        self.wrong[geometry] = self.wrong.get(geometry, 0) + len(where)
        # Values of any kind, digests of ranks among them: tolist makes all of them Python's.
        for at in where[: MAX_PLACES - len(self.places)].tolist():
            self.places.append(
                place
                | {
                    "geometry": geometry,
                    "index": at,
                    "expected": expected.reshape(-1)[at : at + 1].tolist()[0],
                    "actual": actual.reshape(-1)[at : at + 1].tolist()[0],
                }
            )


class Verdicts:
    """The verdicts of all checks, by code."""

    def __init__(self) -> None:
        self._all: dict[str, Verdict] = {}

    def same(
        self, code: str, geometry: str, place: dict[str, Scalar], actual: Array, expected: Array
    ) -> None:
        """Hold ``actual`` equal to ``expected``; another shape is wrong everywhere."""
        if actual.shape != expected.shape:
            actual = np.full(expected.shape, np.nan)
            bad = np.ones(expected.shape, dtype=bool)
        else:
            bad = actual != expected
        self._all.setdefault(code, Verdict()).add(geometry, bad, place, expected, actual)

    def near(
        self,
        code: str,
        geometry: str,
        place: dict[str, Scalar],
        actual: Array,
        expected: Array,
        bound: Array,
    ) -> None:
        """Hold ``actual`` within ``bound`` of ``expected``, element by element."""
        if actual.shape != expected.shape:
            self.same(code, geometry, place, actual, expected)
            return
        bad = ~(np.abs(actual.astype(np.float64) - expected) <= bound)
        self._all.setdefault(code, Verdict()).add(geometry, bad, place, expected, actual)

    def findings(self, skipped: dict[str, str]) -> list[Finding]:
        """One finding a check; ``skipped`` says why some were not asked."""
        found = []
        for code, info in checks().items():
            if not code.startswith("OPD7"):
                continue
            verdict = self._all.get(code)
            if verdict is None:
                why = skipped.get(code, "nothing was compared")
                found.append(Finding(code=code, name=info.name, status="skip", message=why))
                continue
            wrong, compared = sum(verdict.wrong.values()), sum(verdict.compared.values())
            message = info.statement
            if wrong:
                message = f"{wrong:,} of {compared:,} values differ: not so that {message}"
            found.append(
                Finding(
                    code=code,
                    name=info.name,
                    status="fail" if wrong else "pass",
                    message=message,
                    mismatches=wrong,
                    total=compared,
                    first=tuple(verdict.places),
                )
            )
        return found

    def tables(self) -> list[Table]:
        """One table a geometry."""
        names = dict.fromkeys(g for verdict in self._all.values() for g in verdict.compared)
        return [
            Table(
                title=geometry,
                columns=("code", "check", "compared", "differ", "verdict"),
                rows=tuple(
                    (
                        code,
                        check_name(code),
                        f"{verdict.compared[geometry]:,}",
                        f"{verdict.wrong[geometry]:,}",
                        "fail" if verdict.wrong[geometry] else "pass",
                    )
                    for code, verdict in sorted(self._all.items())
                    if geometry in verdict.compared
                ),
                numeric=frozenset({"compared", "differ"}),
            )
            for geometry in names
        ]
