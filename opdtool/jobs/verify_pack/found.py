"""What is read from while a dump is verified, and what was found in its packs so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from opdtool.checks.content_verdict import ContentPack
from opdtool.checks.hypotheses import MaskWeights, PackCase
from opdtool.checks.layout_outcome import LayoutOutcome
from opdtool.checks.masks_findings import MaskPack
from opdtool.checks.masks_sample import thinned
from opdtool.checks.recipes_values import Cells, Values
from opdtool.checks.registry import check_name
from opdtool.checks.room import ROOM, Room
from opdtool.core.geometry import PackGeometry
from opdtool.findings import Finding, Status
from opdtool.io.batch import Batch
from opdtool.jobs.dump_files import DumpFiles


@dataclass(slots=True, kw_only=True)
class PackRun:
    """The work on one dump: what is read from, and what was found so far."""

    files: DumpFiles
    batch: Batch
    geometry: PackGeometry
    weights: MaskWeights | None
    room: Room = ROOM
    cells: dict[tuple[str, bool, bool], Cells] = field(default_factory=dict)
    """By tensor and how its values are told apart: all packs share the rows at hand."""
    failing: Counter[str] = field(default_factory=Counter)
    """By tensor, how many packs' are wrong."""
    outcomes: list[tuple[str, LayoutOutcome]] = field(default_factory=list)
    tensors: dict[str, list[ContentPack]] = field(default_factory=dict)
    masks: list[MaskPack] = field(default_factory=list)
    loose: dict[str, list[Finding]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def keep_sample(self, tensor: str, case: PackCase) -> None:
        """Keep as much of a wrong tensor's sample as will be looked at."""
        if case.sample is not None:
            self.failing[tensor] += 1
            case.sample = thinned(case.sample, self.failing[tensor])

    def cells_of(
        self,
        source: str,
        decode: Callable[[Tensor], Values],
        token_size: int,
        *,
        wide: bool,
        floats: bool,
    ) -> Cells:
        """The batch's values of one tensor, one a token."""
        key = (source, wide, floats)
        if key not in self.cells:
            for others in self.cells.values():
                others.forget()
            self.cells[key] = Cells(
                batch=self.batch,
                name=source,
                width=self.batch.width,
                decode=decode,
                token_size=token_size,
                room=self.room,
            )
        return self.cells[key]

    def note(self, pack: str, code: str, status: Status, message: str, tensor: str) -> None:
        """A finding on one pack that is merged with those of the others."""
        finding = Finding(
            code=code, name=check_name(code), status=status, message=message, tensor=tensor
        )
        self.loose.setdefault(pack, []).append(finding)

    def absorb(self, other: PackRun) -> None:
        """Take in what was found on further packs."""
        self.outcomes += other.outcomes
        for tensor, packs in other.tensors.items():
            self.tensors.setdefault(tensor, []).extend(packs)
        self.masks += other.masks
        for pack, findings in other.loose.items():
            self.loose.setdefault(pack, []).extend(findings)
        self.unknown |= other.unknown

    @property
    def shared(self) -> dict[str, object]:
        """What verdicts refer to and each process has for itself."""
        return {"files": self.files, "batch": self.batch, "weights": self.weights or "no weights"}
