"""Numbers as a report holds and shows them."""

from __future__ import annotations

import math
from typing import Any


def number(value: float) -> float | str:
    """A number that JSON can hold: what is not finite becomes a word."""
    if math.isfinite(value):
        return value + 0.0  # no -0
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def format_number(value: Any) -> str:
    """Four digits of a number, or the word for what is none."""
    return f"{value + 0:.4g}" if isinstance(value, float | int) else str(value)
