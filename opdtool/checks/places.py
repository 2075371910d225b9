"""Places of mismatches in words."""

from __future__ import annotations

from collections.abc import Mapping

from opdtool.findings import Scalar


def describe(place: Mapping[str, Scalar]) -> str:
    """A place in words."""
    words = []
    if "pack" in place:
        words.append(f"{place['pack']},")
    if "sequence" in place:
        words.append(f"sequence {place['sequence']},")
    elif "segment" in place:
        words.append(f"segment {place['segment']} (no row of the batch),")
    if "position" in place:
        words.append(f"position {place['position']}")
        words.append(f"(slot {place['slot']}, rank {place['cp_rank']}):")
    else:
        words.append(f"slot {place['slot']}:")
    words.append(f"expected {number(place['expected'])}, found {number(place['actual'])}")
    if "token_ids" in place:
        words.append(f"(token ids {place['token_ids']})")
    return " ".join(words)


def number(value: Scalar) -> str:
    """A value as short as it is exact."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
