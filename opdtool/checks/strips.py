"""Strips: a run of slots of one sequence, expected over actual, so that one sees the shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from opdtool.checks.hypotheses import PackCase
from opdtool.checks.places import number
from opdtool.checks.recipes import Ints
from opdtool.core.layout import PackedLayout
from opdtool.core.words import plural
from opdtool.findings import Strip

Ids = Callable[[int, int, int], Sequence[int]]
"""(row, first column, stop) -> the token ids there."""
STRIP_SLOTS = 24


def strip_of(
    case: PackCase, ids: Ids | None, slot: int, *, pack: str = "", tensor: str = ""
) -> Strip | None:
    """Expected over actual around a slot of the pack, within its sequence.

    ``pack`` and ``tensor`` are named in the title where they are given.
    """
    layout, right = case.layout, case.right
    if layout is None or right is None:
        return None
    segment = int(layout.segments_of(torch.tensor([slot]))[0])
    begin, end = (int(x) for x in layout.cu_seqlens_padded[segment : segment + 2])
    first = max(begin, min(slot - STRIP_SLOTS // 3, end - STRIP_SLOTS))
    stop = min(end, first + STRIP_SLOTS)
    at = np.arange(first, stop, dtype=np.int64)
    there = dump_slots(case, layout, at)
    order = np.argsort(there)
    found = case.slots.take(there[order])
    actual = np.empty(len(at), dtype=found.dtype)
    actual[order] = found
    expected = case.values(right, there)
    agrees = case.agrees(right, there, actual)
    row = layout.row_of(segment)
    length = int(layout.lengths[segment])
    rows = [("position", tuple(str(int(i)) for i in at - begin))]
    if ids is not None and row is not None:
        known = [
            str(i) for i in ids(row, first - begin, max(first, min(stop, begin + length)) - begin)
        ]
        rows.append(("token id", tuple(known + ["."] * (len(at) - len(known)))))
    rows.append(("expected", tuple(number(v.item()) for v in expected)))
    rows.append(("actual", tuple(number(v.item()) for v in actual)))
    where = f"sequence {row}" if row is not None else f"segment {segment}"
    where = ", ".join(part for part in (tensor, pack, where) if part)
    return Strip(
        title=f"First wrong sequence: {where}, {plural(length, 'token')} in "
        f"{plural(end - begin, 'slot')}",
        rows=tuple(rows),
        wrong=frozenset(np.flatnonzero(~agrees).tolist()),
    )


def dump_slots(case: PackCase, layout: PackedLayout, at: Ints) -> Ints:
    """Where slots of the pack are in the dump."""
    if case.whole:
        return at
    rank, local = layout.owners(torch.from_numpy(at))
    found: Ints = (rank * layout.local_total + local).numpy()
    return found
