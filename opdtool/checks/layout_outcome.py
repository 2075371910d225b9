"""What the checks of a pack's offsets are given, and what they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from opdtool.checks.recipes import Ints
from opdtool.checks.registry import check_name
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from opdtool.findings import MAX_PLACES, Finding, Scalar, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class PackVectors:
    """What a dump says of one pack's layout: tensors as found, None where there is none.

    ``slots`` are counted over all the dump's pieces; ``lengths`` int64 [B] are the batch's.
    ``whole`` marks a dump of the whole pack, which no rank has cut.
    """

    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    sequence_index: Tensor | None
    lengths: Ints
    geometry: PackGeometry
    slots: int
    whole: bool


@dataclass(slots=True, kw_only=True)
class LayoutOutcome:
    """The findings on a pack's offsets, the faults they prove, and the layout to go on with.

    ``rows`` and ``lengths`` int64 [n] are of the segments that hold batch rows. ``faults``
    maps each proven fault to what was found. ``soft`` are the codes of warnings that turn
    into failures when the content does not agree with the batch's own lengths, ``suspects``
    the faults that they hint at.
    """

    findings: list[Finding] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    layout: PackedLayout | None = None
    rows: Ints
    lengths: Ints
    dump_lengths: Ints | None = None
    soft: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)

    def add(
        self,
        code: str,
        status: Status,
        message: str,
        *,
        tensor: str | None = None,
        places: list[Mapping[str, Scalar]] | None = None,
        total: int | None = None,
    ) -> None:
        """One more finding."""
        self.findings.append(
            Finding(
                code=code,
                name=check_name(code),
                status=status,
                message=message,
                tensor=tensor,
                mismatches=len(places) if places is not None else None,
                total=total,
                first=tuple((places or [])[:MAX_PLACES]),
            )
        )

    def settle(self, content_agrees: bool) -> None:
        """Turn the soft warnings into failures where the content does not agree."""
        if content_agrees:
            return
        self.findings = [
            replace(finding, status="fail") if finding.code in self.soft else finding
            for finding in self.findings
        ]
