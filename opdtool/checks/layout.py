"""Checks of a pack's cumulative lengths, and the layout that its content is judged by.

The right layout takes every real length from the batch and the padded offsets from the dump
(else from the geometry). Where the dump's offsets are broken in a known way, the mended ones
are used, so that one mistake is not reported as two.

Legend: B batch rows, N segments, T packed slots, n segments that hold batch rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.layout_lengths import check_real_lengths
from opdtool.checks.layout_multiples import check_multiples
from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.checks.recipes import Ints
from opdtool.core.layout import PackedLayout
from opdtool.core.words import plural
from opdtool.findings import Scalar

VECTORS = ("cu_seqlens", "cu_seqlens_padded")
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def check_layout(given: PackVectors) -> LayoutOutcome:
    """All layout checks of one pack, and the layout that its content is judged by."""
    rows, outcome = _rows(given)
    real = _offsets(given.cu_seqlens, "cu_seqlens", outcome)
    padded = _offsets(given.cu_seqlens_padded, "cu_seqlens_padded", outcome)
    if real is None and padded is None:
        if given.cu_seqlens is None and given.cu_seqlens_padded is None:
            outcome.layout = _from_geometry(given, rows)
            _end(given, outcome, None if outcome.layout is None else outcome.layout.total)
        else:
            outcome.layout = _from_geometry(given, rows)
        return outcome
    n = len(rows)
    _entries(real, padded, n, given, outcome)
    if padded is None:
        outcome.layout = _from_geometry(given, rows)
        _end(given, outcome, None if outcome.layout is None else outcome.layout.total)
    else:
        _end(given, outcome, int(padded[-1]))
        mended = _mend(real, padded, given, outcome)
        check_multiples(mended, padded, given, outcome)
        outcome.layout = _layout(mended, given, outcome) or _from_geometry(given, rows)
    check_real_lengths(real, padded, given, outcome)
    return outcome


def _rows(given: PackVectors) -> tuple[Ints, LayoutOutcome]:
    """The batch row of each segment that holds one, checked."""
    B = len(given.lengths)
    vectors = (given.cu_seqlens_padded, given.cu_seqlens)
    segments = [v.numel() - 1 for v in vectors if v is not None]
    rows = np.arange(B, dtype=np.int64)
    empty = np.zeros(0, dtype=np.int64)
    outcome = LayoutOutcome(rows=empty, lengths=empty)
    index = given.sequence_index
    if index is not None:
        problem = _index_problem(index, B, segments)
        if problem:
            outcome.add("OPD109", "fail", problem, tensor="sequence_index")
        else:
            rows = index.reshape(-1).to(torch.int64).numpy()
            outcome.add(
                "OPD109",
                "pass",
                f"{plural(len(rows), 'row')} of {B}, each once",
                tensor="sequence_index",
            )
    if segments and len(rows) > segments[0]:
        rows = rows[: max(segments[0], 0)]
    outcome.rows, outcome.lengths = rows, given.lengths[rows]
    return rows, outcome


def _index_problem(index: Tensor, B: int, segments: list[int]) -> str | None:
    if index.dtype not in INTEGERS or index.ndim > 2 or (index.ndim == 2 and 1 not in index.shape):
        return f"has dtype {_dtype(index)} and shape {list(index.shape)}; expected integers [n]"
    values = index.reshape(-1).to(torch.int64).numpy()
    outside = np.flatnonzero((values < 0) | (values >= B))
    if len(outside):
        at = int(outside[0])
        return f"entry {at} is {values[at]}, outside the batch's rows 0..{B - 1}"
    _, counts = np.unique(values, return_counts=True)
    if (counts > 1).any():
        at = int(np.flatnonzero(counts > 1)[0])
        return f"row {int(np.unique(values)[at])} is named {int(counts[at])} times; expected once"
    if segments and len(values) > segments[0]:
        return (
            f"has {plural(len(values), 'entry')} for {plural(segments[0], 'segment')}; "
            "expected no more than those"
        )
    return None


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _offsets(values: Tensor | None, name: str, outcome: LayoutOutcome) -> Ints | None:
    """A vector as int64 [N+1], its own checks made; None where it cannot be used as numbers."""
    if values is None:
        message = f"the dump has no {name}: its dtype, start and order are not checked"
        outcome.add("OPD101", "skip", message, tensor=name)
        return None
    if values.dtype not in INTEGERS:
        message = f"has dtype {_dtype(values)}; cumulative lengths are integers, such as int32"
        outcome.add("OPD101", "fail", message, tensor=name)
        whole = _whole_numbers(values)
        if whole is not None:
            _start_and_order(whole, name, outcome)
        return whole
    if values.numel() == 0 or values.numel() != max(values.shape, default=0):
        message = f"has shape {list(values.shape)}; expected [N+1]"
        outcome.add("OPD101", "fail", message, tensor=name)
        return None
    flat = values.reshape(-1)
    if flat.dtype == torch.uint64 and (flat.numpy() > np.iinfo(np.int64).max).any():
        outcome.add("OPD101", "fail", "holds values past 2**63; an overflow", tensor=name)
        return None
    offsets: Ints = flat.to(torch.int64).numpy()
    outcome.add("OPD101", "pass", f"{_dtype(values)} [{len(offsets)}]", tensor=name)
    _start_and_order(offsets, name, outcome)
    return offsets


def _whole_numbers(values: Tensor) -> Ints | None:
    """Offsets of a wrong dtype that still say the layout, so that one mistake is one failure."""
    if values.ndim != 1 or not values.numel() or not values.is_floating_point():
        return None
    exact = values.to(torch.float64)
    if not ((exact == exact.trunc()) & (exact.abs() < 1 << 53)).all():
        return None
    return np.asarray(exact.to(torch.int64).numpy())


def _start_and_order(offsets: Ints, name: str, outcome: LayoutOutcome) -> None:
    if offsets[0] == 0:
        outcome.add("OPD102", "pass", "starts at 0", tensor=name)
    else:
        message = f"starts at {offsets[0]}; cumulative lengths start at 0"
        outcome.add("OPD102", "fail", message, tensor=name)
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls) == 0:
        outcome.add("OPD103", "pass", "never falls", tensor=name)
        return
    at = int(falls[0])
    message = f"falls from {offsets[at]} to {offsets[at + 1]} at entry {at + 1}"
    places: list[Mapping[str, Scalar]] = [
        {"segment": int(i), "expected": f">= {offsets[i]}", "actual": int(offsets[i + 1])}
        for i in falls
    ]
    outcome.add("OPD103", "fail", message, tensor=name, places=places, total=len(offsets))
    outcome.faults.setdefault("cu-seqlens-not-monotone", f"{name} {message}")


def _entries(
    real: Ints | None, padded: Ints | None, n: int, given: PackVectors, outcome: LayoutOutcome
) -> None:
    if real is not None and padded is not None and len(real) != len(padded):
        message = (
            f"cu_seqlens has {plural(len(real), 'entry')} and cu_seqlens_padded {len(padded)}; "
            "both have one more than there are segments"
        )
        outcome.add("OPD104", "fail", message)
        return
    first = padded if padded is not None else real
    assert first is not None
    segments, B = len(first) - 1, len(given.lengths)
    expected = len(given.lengths) if given.sequence_index is None else n
    if segments < expected:
        message = (
            f"{plural(segments, 'segment')} for the {plural(B, 'row')} of the batch; "
            "where a pack holds part of a batch, sequence_index must say which rows"
        )
        outcome.add("OPD104", "fail", message)
        return
    outcome.add("OPD104", "pass", f"{plural(segments, 'segment')} for {plural(n, 'row')}")


def _end(given: PackVectors, outcome: LayoutOutcome, end: int | None) -> None:
    if end is None:
        end = _geometry_total(given, outcome.rows)
    whose = "cu_seqlens_padded ends" if given.cu_seqlens_padded is not None else "the geometry ends"
    if end == given.slots:
        outcome.add("OPD107", "pass", f"{plural(end, 'slot')}, as many as are dumped")
        return
    message = f"{whose} at {end}, but the dump holds {plural(given.slots, 'slot')}"
    if given.cu_seqlens_padded is None:
        message += (
            "; give the padding it was packed with "
            "(--cp, --tp, --pad-multiple, --fp8, --pad-packed-to, --tail)"
        )
    outcome.add("OPD107", "fail", message, tensor="cu_seqlens_padded")


def _geometry_total(given: PackVectors, rows: Ints) -> int:
    physical = given.geometry.padded(given.lengths[rows])
    return given.geometry.padded_total(int(physical.sum()))


def _from_geometry(given: PackVectors, rows: Ints) -> PackedLayout | None:
    """The geometry's own layout, where it has the dump's slots."""
    layout = given.geometry.layout(given.lengths[rows], sequence_index=rows)
    return layout if layout.total == given.slots else None


def _fits(padded: Ints, given: PackVectors, outcome: LayoutOutcome) -> bool:
    """Whether padded offsets cover the dump's slots and can be cut by its ranks."""
    n = len(outcome.rows)
    width = np.diff(padded)
    cp = 1 if given.whole else given.geometry.cp_size
    return bool(
        padded[0] == 0
        and padded[-1] == given.slots
        and (width >= 0).all()
        and len(width) >= n
        and (cp == 1 or (width % (2 * cp) == 0).all())
    )


def _mend(real: Ints | None, padded: Ints, given: PackVectors, outcome: LayoutOutcome) -> Ints:
    """The padded offsets, mended where they are wrong in a known way, and that way noted."""
    n, lengths = len(outcome.rows), outcome.lengths
    cp = given.geometry.cp_size
    if real is not None and not np.array_equal(real, padded) and _lengths_are(padded, lengths):
        swapped = len(real) == len(padded) and (np.diff(real)[:n] >= lengths).all()
        if swapped and real[-1] == given.slots:
            outcome.faults["cu-seqlens-swapped"] = (
                "cu_seqlens holds the padded offsets and cu_seqlens_padded the real ones"
            )
            return real
    if "cu-seqlens-not-monotone" in outcome.faults:
        return padded
    fits = _fits(padded, given, outcome)
    if cp > 1 and padded[-1] * cp == given.slots and _holds(padded * cp, lengths):
        outcome.faults["cu-seqlens-divided-by-cp"] = (
            f"cu_seqlens_padded ends at {padded[-1]} = {given.slots} / {cp}"
        )
        return padded * cp
    if padded[-1] == given.slots or fits:
        return padded
    ended = padded.copy()
    ended[-1] = given.slots
    if _holds(ended, lengths):
        outcome.faults["cu-seqlens-wrong-end"] = (
            f"cu_seqlens_padded ends at {padded[-1]}, the pack at {given.slots}"
        )
        return ended
    return padded


def _lengths_are(offsets: Ints, lengths: Ints) -> bool:
    found = np.diff(offsets)
    return len(found) >= len(lengths) and bool(
        (found[: len(lengths)] == lengths).all() and (found[len(lengths) :] == 0).all()
    )


def _holds(padded: Ints, lengths: Ints) -> bool:
    width = np.diff(padded)
    return len(width) >= len(lengths) and bool(
        (width >= 0).all() and (width[: len(lengths)] >= lengths).all()
    )


def _layout(padded: Ints, given: PackVectors, outcome: LayoutOutcome) -> PackedLayout | None:
    """The batch's lengths in these padded offsets; a row that does not fit is cut short."""
    if not _fits(padded, given, outcome):
        return None
    n = len(outcome.rows)
    width = np.diff(padded)
    lengths = np.zeros(len(width), dtype=np.int64)
    lengths[:n] = np.minimum(outcome.lengths, width[:n])
    cp = given.geometry.cp_size
    if (width % (2 * cp)).any():
        cp = 1
    return PackedLayout(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        cu_seqlens_padded=padded,
        cp_size=cp,
        sequence_index=outcome.rows,
    )
