"""A pack's tensors judged together: findings a tensor, and one diagnosis for them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opdtool.checks.content import ContentCase, ContentScan
from opdtool.checks.diagnose import Explanation, as_diagnosis, explain, fault_order, makes
from opdtool.checks.faults_content import content_forms
from opdtool.checks.faults_masks import mask_forms
from opdtool.checks.hypotheses import Form, PackCase
from opdtool.checks.layout_outcome import LayoutOutcome
from opdtool.checks.masks import Count
from opdtool.checks.masks_findings import MaskPack
from opdtool.checks.masks_verdict import property_diagnosis
from opdtool.checks.places import describe
from opdtool.checks.recipes import placed, trace
from opdtool.checks.registry import check_name
from opdtool.core.words import plural
from opdtool.findings import MAX_PLACES, Diagnosis, Finding, Scalar, Status

CODES = {"input_ids": "OPD201", "target_ids": "OPD202", "position_ids": "OPD203"}
OTHER = "OPD204"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPack:
    """One tensor of one pack, looked at."""

    name: str
    tensor: str
    case: ContentCase
    scan: ContentScan
    hashed: bool = False
    """Whether its tokens have further dimensions, so that a slot has no one value to show."""


def content_findings(packs: Sequence[ContentPack]) -> list[Finding]:
    """The findings on one tensor over all packs."""
    tensor = packs[0].tensor
    judged = [pack for pack in packs if pack.case.layout is not None]
    code = CODES.get(tensor, OTHER)
    if not judged:
        message = "no layout fits the dump; see the layout checks"
        return [_finding(code, "skip", message, tensor)]
    out = [_counted(code, judged, "values", "differ from the batch", "as in the batch", "fail")]
    if tensor == "target_ids":
        wrong = "have no real successor and hold a token of elsewhere"
        held = "slots without a successor hold nothing of elsewhere"
        out.append(_counted("OPD208", judged, "fill", wrong, held, "fail"))
    if judged[0].case.kind != "strict":
        filled = "of padding are filled in another way than opdtool pack fills them"
        out.append(_counted("OPD206", judged, "padding", filled, "padding as expected", "warn"))
    return out


def _finding(code: str, status: Status, message: str, tensor: str) -> Finding:
    return Finding(code=code, name=check_name(code), status=status, message=message, tensor=tensor)


def _counted(
    code: str,
    packs: Sequence[ContentPack],
    rule: str,
    broken: str,
    held: str,
    status: Status,
) -> Finding:
    counts: list[tuple[ContentPack, Count]] = [(pack, getattr(pack.scan, rule)) for pack in packs]
    total = sum(pack.scan.total for pack in packs)
    wrong = sum(count.count for _, count in counts)
    empty = _finding(code, "pass", held, packs[0].tensor)
    if wrong == 0:
        return replace(empty, mismatches=0, total=total)
    first: list[Mapping[str, Scalar]] = []
    for pack, count in counts:
        for slot, expected, actual in count.first[: MAX_PLACES - len(first)]:
            place: dict[str, Scalar] = {} if len(packs) == 1 else {"pack": pack.name}
            assert pack.case.layout is not None
            place |= pack.case.layout.locate(slot)
            if not pack.hashed:
                place |= {"expected": expected, "actual": actual}
            first.append(place)
    words = describe(first[0]) if "expected" in first[0] else _where(first[0])
    message = f"{wrong} of {total} slots {broken}; first: {words}"
    return replace(
        empty, status=status, message=message, mismatches=wrong, total=total, first=tuple(first)
    )


def _where(place: Mapping[str, Scalar]) -> str:
    return describe({**place, "expected": "", "actual": ""}).partition(": expected")[0]


def diagnose_packs(
    outcomes: Sequence[LayoutOutcome],
    tensors: Mapping[str, Sequence[ContentPack]],
    masks: Sequence[MaskPack],
) -> tuple[Diagnosis, ...]:
    """What the offsets prove and what the tensors say together, the root cause first.

    A fault that explains more of the tensors that failed comes first: it is the one cause. A
    fault of all tensors that some right tensor speaks against comes after the others.
    """
    proven: dict[str, str] = {}
    for outcome in outcomes:
        for fault, note in outcome.faults.items():
            proven.setdefault(fault, note)
    hinted = set(proven).union(*(outcome.suspects for outcome in outcomes))
    explained: dict[tuple[str, ...], list[tuple[str, Explanation]]] = {}
    for tensor, packs in tensors.items():
        forms = content_forms(packs[0].case.kind)
        _explain(tensor, [pack.case for pack in packs], forms, explained)
        for pack in packs:
            if pack.case.cells is not None:
                pack.case.cells.forget()
    if masks:
        forms = mask_forms(masks[0].case.shift)
        _explain("draft_token_mask", [pack.case for pack in masks], forms, explained)
    ranked: list[tuple[tuple[int, ...], Diagnosis]] = [
        ((0, 0, 0, -len(tensors) - 1, fault_order(fault)), property_diagnosis(fault, note))
        for fault, note in proven.items()
    ]
    for names, found in explained.items():
        if len(names) == 1 and names[0] in proven:
            continue
        entry = as_diagnosis(found[0][1])
        where = ", ".join(tensor for tensor, _ in found)
        rank = (
            entry.match != "exact",
            _contradicted(found, tensors),
            not any(name in hinted for name in names),
            -len(found),
            *(fault_order(name) for name in names),
        )
        ranked.append((rank, replace(entry, message=f"{where}: {entry.message}")))
    return tuple(entry for _, entry in sorted(ranked, key=lambda pair: pair[0]))


def _contradicted(
    found: Sequence[tuple[str, Explanation]], tensors: Mapping[str, Sequence[ContentPack]]
) -> bool:
    """Whether a fault of where rows lie or how ranks cut them, which would show in input_ids
    too, does not."""
    forms = [form for form in found[0][1].forms if form.axis in ("placement", "cut")]
    explained = {tensor for tensor, _ in found}
    packs = tensors.get("input_ids", ())
    if not forms or "input_ids" in explained or any(pack.case.mismatches for pack in packs):
        return False
    return any(not makes(forms, pack.case) for pack in packs)


def _explain(
    tensor: str,
    cases: Sequence[PackCase],
    forms: Sequence[Form],
    explained: dict[tuple[str, ...], list[tuple[str, Explanation]]],
) -> None:
    if all(case.layout is None for case in cases) or any(case.mismatches for case in cases):
        for entry in explain(cases, forms):
            explained.setdefault(entry.names, []).append((tensor, entry))


def follows_padding(case: ContentCase, outcome: LayoutOutcome) -> str | None:
    """The fault by which a pack's tokens run on into padding as far as its own cu_seqlens say,
    where the batch holds tokens there; None where they do not, or where it is all one pad id.
    """
    layout = case.layout
    if layout is None or not outcome.suspects or case.mismatches:
        return None
    fault = min(outcome.suspects, key=fault_order)
    length = layout.lengths.copy()
    n = layout.num_rows
    room = np.minimum(layout.padded_lengths, case.width)
    if fault == "cu-seqlens-padded-twice":
        length[:n] = room[:n]
    elif outcome.dump_lengths is not None and n:
        length[n - 1] = min(int(outcome.dump_lengths[-1]), case.width)
    made = case.filled(placed(layout, length=length))
    right = case.right
    assert right is not None
    tokens: set[int] = set()
    for start, stop in case.slots.blocks():
        slots = np.arange(start, stop, dtype=np.int64)
        more = trace(made.route, slots).real & ~trace(right.route, slots).real
        values, actual = case.values(made, slots)[more], case.slots.read(start, stop)[more]
        if not np.array_equal(values, actual):
            return None
        tokens.update(np.unique(values)[:2].tolist())
    return fault if len(tokens) > 1 else None


def covered(outcomes: Sequence[tuple[str, LayoutOutcome]], lengths: Sequence[int]) -> Finding:
    """Whether every row with tokens is in one pack, and in one alone."""
    count = np.zeros(len(lengths), dtype=np.int64)
    for _, outcome in outcomes:
        np.add.at(count, outcome.rows, 1)
    code = "OPD209"
    base = Finding(code=code, name=check_name(code), status="pass", message="")
    twice = np.flatnonzero(count > 1)
    if len(twice):
        places = tuple({"sequence": int(row), "packs": int(count[row])} for row in twice)
        message = f"row {twice[0]} is in {count[twice[0]]} packs; expected in one"
        return replace(
            base,
            status="fail",
            message=message,
            mismatches=len(twice),
            total=len(count),
            first=places[:MAX_PLACES],
        )
    missing = np.flatnonzero((count == 0) & (np.asarray(lengths) > 0))
    if len(missing):
        message = f"{len(missing)} of {len(count)} rows are in no pack, first row {missing[0]}"
        return replace(base, status="warn", message=message)
    return replace(base, message=f"{plural(int((count == 1).sum()), 'row')}, each in one pack")
