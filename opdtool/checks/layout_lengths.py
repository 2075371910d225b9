"""A dump's real lengths against its padded ones and the batch's, and which fault made them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from opdtool.checks.layout_multiples import absorbed_tail
from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.checks.recipes import Bools, Ints
from opdtool.core.words import plural
from opdtool.findings import Scalar


def check_real_lengths(
    real: Ints | None, padded: Ints | None, given: PackVectors, outcome: LayoutOutcome
) -> None:
    """The dump's real lengths against its padded ones (OPD105) and the batch's (OPD108); one of
    the two vectors is there, and there are no more rows than segments."""
    if real is None:
        assert padded is not None
        width = np.diff(padded)[: len(outcome.rows)]
        own = np.concatenate([[0], np.cumsum(outcome.lengths)])
        _fits_padded(outcome.lengths > width, own, padded, outcome)
        outcome.add("OPD108", "skip", "the dump has no cu_seqlens", tensor="cu_seqlens")
        return
    if padded is None or len(padded) != len(real):
        outcome.add("OPD105", "skip", "no cu_seqlens_padded to compare with", tensor="cu_seqlens")
    else:
        long = np.diff(real) > np.diff(padded)
        _fits_padded(long, real, padded, outcome)
    n = len(outcome.rows)
    found = np.diff(real)[:n]
    outcome.dump_lengths = found if len(found) == n else None
    extra = bool((np.diff(real)[n:] != 0).any())
    if len(found) == n and np.array_equal(found, outcome.lengths) and not extra:
        outcome.add("OPD108", "pass", f"{plural(n, 'length')} as in the batch", tensor="cu_seqlens")
        return
    soft = _soft_reason(found, real, padded, given, outcome)
    if soft:
        outcome.add("OPD108", "warn", soft, tensor="cu_seqlens")
        outcome.soft.add("OPD108")
        return
    differ = np.flatnonzero(found != outcome.lengths[: len(found)])
    places: list[Mapping[str, Scalar]] = [
        {
            "sequence": int(outcome.rows[i]),
            "expected": int(outcome.lengths[i]),
            "actual": int(found[i]),
        }
        for i in differ
    ]
    message = (
        f"segments past the {plural(n, 'row')} hold real tokens; they come from no row of the batch"
    )
    if places:
        message = (
            f"sequence {places[0]['sequence']} has a real length of {places[0]['actual']}; "
            f"{places[0]['expected']} in the batch"
        )
    outcome.add("OPD108", "fail", message, tensor="cu_seqlens", places=places, total=n)
    _name_lengths(found, real, given, outcome)


def _fits_padded(long: Bools, real: Ints, padded: Ints, outcome: LayoutOutcome) -> None:
    if not long.any():
        outcome.add("OPD105", "pass", "no sequence is longer than its segment")
        return
    at = int(np.flatnonzero(long)[0])
    message = (
        f"segment {at} has {np.diff(real)[at]} real tokens in {np.diff(padded)[at]} padded slots"
    )
    places: list[Mapping[str, Scalar]] = [
        {
            "segment": int(i),
            "expected": f"<= {padded[i + 1] - padded[i]}",
            "actual": int(real[i + 1] - real[i]),
        }
        for i in np.flatnonzero(long)
    ]
    outcome.add("OPD105", "fail", message, tensor="cu_seqlens", places=places, total=len(long))


def _soft_reason(
    found: Ints, real: Ints, padded: Ints | None, given: PackVectors, outcome: LayoutOutcome
) -> str | None:
    """Why real lengths other than the batch's are no failure by themselves."""
    n = len(outcome.rows)
    if padded is None or len(found) != n or n == 0 or len(padded) != len(real):
        return None
    if (np.diff(padded)[:n] < outcome.lengths).any():
        return None
    if np.array_equal(real, padded):
        outcome.suspects.add("cu-seqlens-padded-twice")
        if np.array_equal(found[:-1], outcome.lengths[:-1]):
            outcome.suspects.add("tail-not-clamped")  # the last length alone is another
        return "equals cu_seqlens_padded: the real lengths are lost, only the batch knows them"
    width = np.diff(padded)
    last, length = int(found[-1]), int(outcome.lengths[-1])
    if not np.array_equal(found[:-1], outcome.lengths[:-1]):
        return None
    if last == length and np.array_equal(np.diff(real)[n:], width[n:]):
        outcome.suspects.add("tail-not-clamped")
        return (
            f"segments past the {plural(n, 'row')} count as real tokens: a tail that is not empty"
        )
    tail = absorbed_tail(outcome.lengths, width, given.geometry)
    if tail and last in (length + tail, width[n - 1]):
        outcome.suspects.add("tail-not-clamped")
        tokens = plural(length, "token")
        return f"the last length, {last}, takes in the tail; the sequence has {tokens}"
    return None


def _name_lengths(found: Ints, real: Ints, given: PackVectors, outcome: LayoutOutcome) -> None:
    """Which known fault made these real lengths."""
    n, lengths, cp = len(outcome.rows), outcome.lengths, given.geometry.cp_size
    known = {"cu-seqlens-swapped", "cu-seqlens-not-monotone", "cu-seqlens-divided-by-cp"}
    if known & set(outcome.faults):
        return
    true = np.concatenate([[0], np.cumsum(lengths)])
    if cp > 1 and np.array_equal(real[: n + 1], true // cp):
        outcome.faults["cu-seqlens-divided-by-cp"] = (
            f"cu_seqlens ends at {real[-1]}, not at {true[-1]}"
        )
    if len(found) == n and n and (found == lengths - 1).all():
        outcome.faults["lengths-off-by-one"] = "every real length is one less than in the batch"
    elif len(found) == n and n and (found == lengths + 1).all():
        outcome.faults["lengths-off-by-one"] = "every real length is one more than in the batch"
    elif len(found) == n and n and np.array_equal(real[:n], true[:-1]) and real[n] != true[n]:
        outcome.faults.setdefault(
            "cu-seqlens-wrong-end", f"cu_seqlens ends at {real[n]}, the batch at {true[-1]}"
        )
    elif n and len(real) > n + 1 and np.array_equal(real[: n + 1], true) and real[-1] != true[-1]:
        outcome.faults.setdefault(
            "cu-seqlens-wrong-end", f"cu_seqlens ends at {real[-1]}, the batch at {true[-1]}"
        )
