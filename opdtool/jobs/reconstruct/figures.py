"""Numbers as a report holds and shows them."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal
from typing import Any

from opdtool.core.bounds import EPS


def number(value: float) -> float | str:
    """A number that JSON can hold: what is not finite becomes a word."""
    if math.isfinite(value):
        return value + 0.0  # no -0
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def format_number(value: Any) -> str:
    """Four digits of a number, or the word for what is none."""
    return f"{value + 0:.4g}" if isinstance(value, float | int) else str(value)


def format_least(value: Any) -> str:
    """Four digits of a number that is enough: rounded up, so that what is shown is enough too."""
    if not isinstance(value, float | int) or value == 0:
        return format_number(value)
    step = Decimal(1).scaleb(Decimal(value).adjusted() - 3)
    return f"{float(Decimal(value).quantize(step, rounding=ROUND_CEILING)):.4g}"


def rounded_up(ratio: float) -> float:
    """A ratio of float32 numbers that is enough whichever way it was rounded."""
    return ratio * (1 + 4 * EPS)
