"""What segments are padded to: whether each is a multiple, and which slots are a tail's.

A pack's total has a multiple of its own (contract 5.1), so that the tail, wherever it lies, is
no part of what the sequences' multiple is asked of.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.checks.recipes import Ints
from opdtool.core.errors import InputError
from opdtool.core.geometry import PackGeometry
from opdtool.core.words import plural
from opdtool.findings import MAX_PLACES, Scalar


def absorbed_tail(lengths: Ints, width: Ints, geometry: PackGeometry) -> int:
    """How many slots at the end of the last row's segment are a tail that it absorbed.

    ``lengths`` [n] are the rows', ``width`` [N] the segments'. Where the geometry does not tell
    how sequences are padded, the widths do, and what one multiple can explain is no tail:

        lengths 4 3 3, widths 4 4 4:   no tail, each is padded to 4
        lengths 4 3 3, widths 4 4 12:  a tail of 8
    """
    n = len(lengths)
    if n == 0 or len(width) < n or geometry.tail == "segment" or width[n:].any():
        return 0
    last, aligned = int(width[n - 1]), int(geometry.padded(lengths[n - 1 :])[0])
    width = width[:n]
    if aligned >= last:
        return 0
    if geometry.pad_multiple is not None or _made_by(geometry, lengths, width):
        return last - aligned
    if _one_multiple(lengths, width):
        return 0
    others = lengths[:-1], width[:-1]
    if not np.array_equal(geometry.padded(others[0]), others[1]) and _one_multiple(*others):
        multiple = int(np.gcd.reduce(others[1]))
        aligned = -(-int(lengths[-1]) // multiple) * multiple
    return max(last - aligned, 0)


def _made_by(geometry: PackGeometry, lengths: Ints, width: Ints) -> bool:
    """Whether the geometry's own layout has these widths."""
    physical = geometry.padded(lengths)
    try:
        total = geometry.padded_total(int(physical.sum()))
    except InputError:
        return False
    return total == int(width.sum()) and np.array_equal(physical[:-1], width[:-1])


def _one_multiple(lengths: Ints, width: Ints) -> bool:
    """Whether some multiple makes every width of its length: then their common one does."""
    return bool((width - lengths < np.gcd.reduce(width)).all()) if width.any() else False


def check_multiples(mended: Ints, padded: Ints, given: PackVectors, outcome: LayoutOutcome) -> None:
    """Whether segments and total are the multiples that the geometry needs (OPD106).

    The fault is only named where the offsets, mended of other faults, have it too.
    """
    needs = _needs(padded, given, outcome)
    width = np.diff(padded)
    uneven = np.flatnonzero(width % needs)
    total_need = given.geometry.total_multiple
    if len(uneven):
        places: list[Mapping[str, Scalar]] = [
            {
                "segment": int(i),
                "expected": f"a multiple of {needs[i]}",
                "actual": int(width[i]),
            }
            for i in uneven[:MAX_PLACES]
        ]
        at = int(uneven[0])
        message = f"segment {at} has {plural(width[at], 'slot')}, no multiple of {needs[at]}"
        outcome.add("OPD106", "fail", message, tensor="cu_seqlens_padded", places=places)
        wrong = (np.diff(mended) % _needs(mended, given, outcome)).any()
        if wrong and "cu-seqlens-not-monotone" not in outcome.faults:
            outcome.faults["padding-multiple-wrong"] = message
    elif padded[-1] % total_need:
        message = f"the pack ends at {padded[-1]}, no multiple of {total_need}"
        outcome.add("OPD106", "fail", message, tensor="cu_seqlens_padded")
        if mended[-1] % total_need:
            outcome.faults["padding-multiple-wrong"] = message
    else:
        message = f"multiples of {given.geometry.sequence_multiple}"
        outcome.add("OPD106", "pass", message, tensor="cu_seqlens_padded")


def _needs(padded: Ints, given: PackVectors, outcome: LayoutOutcome) -> Ints:
    """The multiple of each segment, int64 [N]: one with a tail, or of nothing else, need only
    be cut by the ranks."""
    geometry, width, n = given.geometry, np.diff(padded), len(outcome.rows)
    needs = np.full(len(width), geometry.sequence_multiple, dtype=np.int64)
    needs[n:] = geometry.base_multiple
    if absorbed_tail(outcome.lengths, width, geometry):
        needs[n - 1] = geometry.base_multiple
    return needs
