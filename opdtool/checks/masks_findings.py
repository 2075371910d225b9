"""From what a scan of masks counted to findings, places and the strip of the first mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from opdtool.checks.hypotheses import MaskCase
from opdtool.checks.masks import Count, MaskScan
from opdtool.checks.places import describe
from opdtool.checks.registry import check_name
from opdtool.checks.strips import Ids
from opdtool.core.layout import PackedLayout
from opdtool.findings import MAX_PLACES, Finding, Scalar, Status

AROUND = 3
"""Token ids shown on each side of a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPack:
    """One pack with its name, its case and what the scan found."""

    name: str
    case: MaskCase
    scan: MaskScan


@dataclass(slots=True, kw_only=True)
class MaskFindings:
    """Findings on the masks of one or many packs, which are named where there are several."""

    packs: Sequence[MaskPack]
    tensor: str
    ids: Ids | None = None
    findings: list[Finding] = field(default_factory=list)

    def all(self) -> list[Finding]:
        """Every finding on the values of the masks, in order of code."""
        shift = self.packs[0].case.shift if self.packs else 1
        self._rule("OPD301", "values", "differ from the expected mask", "as expected")
        self._rule("OPD304", "finite", "are not finite", "finite")
        self._rule("OPD305", "range", "are neither 0 nor 1 nor a weight of the batch", "in range")
        self._rule("OPD306", "padding", "have weight in padding", "padding has no weight")
        if shift:
            self._rule(
                "OPD307", "last", "are last real slots with weight", "last real slots have none"
            )
        else:
            self._add("OPD307", "skip", "an unshifted mask may train the last token")
        self._rule("OPD308", "dropped", "have weight in dropped rows", "dropped rows have none")
        self._constant()
        self._empty_rows()
        return self.findings

    def _add(
        self,
        code: str,
        status: Status,
        message: str,
        mismatches: int | None = None,
        total: int | None = None,
        first: Sequence[Mapping[str, Scalar]] = (),
    ) -> None:
        self.findings.append(
            Finding(
                code=code,
                name=check_name(code),
                status=status,
                message=message,
                tensor=self.tensor,
                mismatches=mismatches,
                total=total,
                first=tuple(first),
            )
        )

    def _rule(self, code: str, rule: str, broken: str, held: str) -> None:
        judged = [pack for pack in self.packs if pack.case.layout is not None]
        if rule == "finite":
            judged = list(self.packs)
        if not judged:
            self._add(code, "skip", "no layout fits the dump; see the layout checks")
            return
        counts = [(pack, getattr(pack.scan, rule)) for pack in judged]
        total = sum(pack.scan.total for pack in judged)
        wrong = sum(count.count for _, count in counts)
        if wrong == 0:
            self._add(code, "pass", held, 0, total)
            return
        first: list[dict[str, Scalar]] = []
        for pack, count in counts:
            if len(first) < MAX_PLACES:
                first += self._places(pack, count)
        place = first[0]
        message = f"{wrong} of {total} slots {broken}; first: {describe(place)}"
        self._add(code, "fail", message, wrong, total, first[:MAX_PLACES])

    def _places(self, pack: MaskPack, count: Count) -> list[dict[str, Scalar]]:
        layout = pack.case.layout
        places = []
        for slot, expected, actual in count.first:
            place: dict[str, Scalar] = {} if len(self.packs) == 1 else {"pack": pack.name}
            if layout is None:
                place |= {"slot": slot}
            else:
                place |= layout.locate(slot)
            place |= {"expected": expected, "actual": _plain(actual)}
            if self.ids is not None and layout is not None:
                place |= self._ids_around(place, layout)
            places.append(place)
        return places

    def _ids_around(self, place: Mapping[str, Scalar], layout: PackedLayout) -> dict[str, Scalar]:
        """The token ids around a place, its own in brackets."""
        row, position = place.get("sequence"), place["position"]
        if not isinstance(row, int) or not isinstance(position, int) or self.ids is None:
            return {}
        segment = place.get("segment", row)
        assert isinstance(segment, int)
        length = int(layout.lengths[segment])
        start, stop = max(0, position - AROUND), min(length, position + AROUND + 1)
        if stop <= start:
            return {}
        ids = [str(i) for i in self.ids(row, start, stop)]
        if position < length:
            ids[position - start] = f"[{ids[position - start]}]"
        return {"token_ids": " ".join(ids)}

    def _constant(self) -> None:
        nonzero = any(pack.scan.any_nonzero for pack in self.packs)
        ones = all(pack.scan.all_one for pack in self.packs)
        if not self.packs:
            self._add("OPD309", "skip", "the ranks' masks do not belong together")
        elif not nonzero:
            self._add("OPD309", "warn", "the mask is all zero: nothing is trained")
        elif ones:
            self._add("OPD309", "warn", "the mask is all one")
        else:
            self._add("OPD309", "pass", "holds zeros and other values")

    def _empty_rows(self) -> None:
        rows = sorted({row for pack in self.packs for row in pack.scan.empty_rows})
        if not rows:
            self._add("OPD310", "pass", "every kept row has something to train")
            return
        named = ", ".join(map(str, rows[:MAX_PLACES]))
        more = " and more" if len(rows) > MAX_PLACES else ""
        word = "row" if len(rows) == 1 else "rows"
        self._add("OPD310", "warn", f"nothing to train in kept {word} {named}{more}")


def _plain(value: float) -> Scalar:
    """A value that JSON can hold."""
    return value if np.isfinite(value) else str(value)
