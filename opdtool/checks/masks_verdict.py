"""One pack's mask judged as a whole, and the verdict over all packs of a dump."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from opdtool.checks.diagnose import diagnose, fault_order
from opdtool.checks.faults_masks import mask_forms
from opdtool.checks.hypotheses import MaskCase, MaskWeights
from opdtool.checks.layout import check_layout
from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.checks.masks import scan_mask
from opdtool.checks.masks_findings import MaskPack
from opdtool.checks.recipes import Ints
from opdtool.checks.recipes_values import Slots, as_numbers
from opdtool.checks.registry import faults
from opdtool.core.geometry import PackGeometry
from opdtool.findings import MAX_PLACES, Diagnosis, Finding


class BatchShape(Protocol):
    """What a check asks a batch for, beside its tensors."""

    @property
    def width(self) -> int:
        """S."""
        ...

    @property
    def lengths(self) -> Ints:
        """Real lengths, int64 [B]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedMask:
    """One pack's mask as found: a reader and the slots of each rank's piece (or of the whole
    pack), and the pack's vectors by name. ``known`` are findings made on the way."""

    name: str
    tensor: str
    pieces: Sequence[Callable[[int, int], Tensor]]
    sizes: Sequence[int]
    vectors: Mapping[str, Tensor | None]
    whole: bool
    shift: int = 1
    atol: float = 0.0
    known: Sequence[Finding] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One pack, looked at."""

    name: str
    outcome: LayoutOutcome
    pack: MaskPack | None


def check_pack(
    dumped: DumpedMask, batch: BatchShape, weights: MaskWeights, geometry: PackGeometry
) -> Checked:
    """Check one pack's offsets and mask."""
    given = PackVectors(
        **dumped.vectors,
        lengths=batch.lengths,
        geometry=geometry,
        slots=sum(dumped.sizes),
        whole=dumped.whole,
    )
    outcome = check_layout(given)
    outcome.findings += dumped.known
    if len(set(dumped.sizes)) > 1:
        return Checked(name=dumped.name, outcome=_uneven(outcome, dumped), pack=None)
    pack = check_mask(dumped, outcome, batch.width, weights, geometry)
    outcome.settle(pack.case.layout is not None and pack.case.mismatches == 0)
    return Checked(name=dumped.name, outcome=outcome, pack=pack)


def check_mask(
    dumped: DumpedMask,
    outcome: LayoutOutcome,
    width: int,
    weights: MaskWeights,
    geometry: PackGeometry,
) -> MaskPack:
    """Check one pack's mask by the layout that its offsets gave."""
    case = MaskCase(
        slots=Slots(
            pieces=dumped.pieces,
            sizes=dumped.sizes,
            decode=as_numbers,
            room=weights.tokens.room,
        ),
        rows=outcome.rows,
        lengths=outcome.lengths,
        width=width,
        layout=outcome.layout,
        geometry=geometry,
        whole=dumped.whole or geometry.cp_size == 1,
        dump_lengths=outcome.dump_lengths,
        weights=weights,
        shift=dumped.shift,
        atol=dumped.atol,
    )
    scan = scan_mask(case)
    case.slots.forget()
    return MaskPack(name=dumped.name, case=case, scan=scan)


def _uneven(outcome: LayoutOutcome, dumped: DumpedMask) -> LayoutOutcome:
    message = f"the ranks hold {', '.join(map(str, dumped.sizes))} slots; expected the same on each"
    outcome.add("OPD302", "fail", message, tensor=dumped.tensor)
    outcome.layout = None
    return outcome


def merge_findings(packs: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """One finding a check and tensor over all packs: the worst, its pack named."""
    worse = {"fail": 0, "warn": 1, "pass": 2, "skip": 3}
    merged: dict[tuple[str, str | None], list[tuple[str, Finding]]] = {}
    for name, findings in packs:
        for finding in findings:
            merged.setdefault((finding.code, finding.tensor), []).append((name, finding))
    out = []
    for entries in merged.values():
        name, worst = min(entries, key=lambda entry: worse[entry[1].status])
        if len(packs) > 1 and worst.status in ("fail", "warn"):
            same = [f for _, f in entries if f.status == worst.status]
            first = [
                {"pack": n, **place}
                for n, f in entries
                if f.status == worst.status
                for place in f.first
            ]
            more = f" (and {len(same) - 1} more packs)" if len(same) > 1 else ""
            worst = replace(
                worst,
                message=f"{name}: {worst.message}{more}",
                first=tuple(first[:MAX_PLACES]),
                mismatches=sum(f.mismatches or 0 for f in same) or worst.mismatches,
            )
        out.append(worst)
    return out


def diagnose_all(checked: Sequence[Checked], shift: int) -> tuple[Diagnosis, ...]:
    """What the offsets prove and what the masks' values say, the root cause first."""
    proven: dict[str, str] = {}
    for entry in checked:
        for fault, note in entry.outcome.faults.items():
            proven.setdefault(fault, note)
    found = [property_diagnosis(fault, note) for fault, note in proven.items()]
    packs = [entry.pack for entry in checked if entry.pack is not None]
    content = diagnose([pack.case for pack in packs], mask_forms(shift))
    found += [entry for entry in content if entry.fault not in proven or entry.faults]
    hinted = set(proven).union(*(entry.outcome.suspects for entry in checked))
    return tuple(sorted(found, key=lambda entry: _priority(entry, hinted)))


def _priority(entry: Diagnosis, hinted: set[str]) -> tuple[int, ...]:
    """Exact before likely, what the offsets prove or hint at before the rest, then in order."""
    names = entry.faults or (entry.fault,)
    known = any(name in hinted for name in names)
    return (entry.match != "exact", not known, *(fault_order(name) for name in names))


def property_diagnosis(fault: str, note: str) -> Diagnosis:
    """A fault that is a property of the offsets, which holds."""
    info = faults()[fault]
    return Diagnosis(
        fault=fault,
        match="exact",
        message=f"{info.statement} ({note})" if note else info.statement,
        fix=info.fix,
    )
