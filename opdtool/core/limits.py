"""The largest sizes that anybody can have meant, and the refusal of larger ones.

Past them a typing error, or a manifest that was written to harm, would be worked on for hours
or overflow an integer.
"""

from __future__ import annotations

import math

from opdtool.core.errors import InputError
from opdtool.core.words import plural

MOST_SLOTS = 2**31 - 1
"""What int32 cumulative lengths can count."""

MOST_RANKS = 2**20

MOST_IDS = 2**31
"""Token ids of a vocabulary, each of which int32 can hold."""


def check_ranks(tp_size: int, cp_size: int) -> None:
    """Refuse more ranks than anybody has.

    Raises:
        InputError: TP x CP is more than ``MOST_RANKS``.
    """
    if tp_size * cp_size > MOST_RANKS:
        raise InputError(
            f"TP {tp_size} x CP {cp_size} are more than {MOST_RANKS:,} ranks; correct --tp and --cp"
        )


def check_slots(what: str, slots: int) -> None:
    """Refuse more slots than cumulative lengths can count; ``what`` begins the sentence.

    Raises:
        InputError: more than ``MOST_SLOTS``.
    """
    if slots > MOST_SLOTS:
        raise InputError(
            f"{what} {plural(slots, 'slot')}, more than int32 cumulative lengths can count; "
            "take a smaller one"
        )


def check_ids(what: str, ids: int | None) -> None:
    """Refuse a vocabulary of more ids than there can be; ``what`` begins the sentence.

    Raises:
        InputError: more than ``MOST_IDS``.
    """
    if ids is not None and ids > MOST_IDS:
        raise InputError(
            f"{what} is {ids:,}, more than token ids can count, which is {MOST_IDS:,}; correct it"
        )


def check_tolerances(**given: float | None) -> None:
    """Refuse tolerances that are negative, infinite or no number; None is none.

    ``check_tolerances(rtol=0.0, atol=1e-3)``: a name is its option's without the dashes.

    Raises:
        InputError: the first that is none.
    """
    for name, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise InputError(f"--{name} is {value}; it must be a finite number of at least 0")
