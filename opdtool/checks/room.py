"""How much a check holds at a time, by the memory that it is given.

Every size has a floor, so that any limit works, and a ceiling, above which more at a time is
no faster. The bytes behind each are of the widest dtypes, temporaries and a mismatch included.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = 1 << 30
"""Bytes that a check may take unless it is told otherwise."""
PER_VALUE = 64
"""Bytes for a slot or batch value that is compared in a block: both sides, and what differs."""
PER_LOOK = 512
"""Bytes for a slot that is looked at by itself: where it comes from, and what is there."""
ROWS_SHARE = 64
"""Bytes for a value that is kept at hand: wide, while it is read and while it is handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Sizes of what is held at a time.

    ``values``: slots, or batch values, that are compared together. ``long``: a sequence of
    more slots or columns is compared in pieces. ``slots``: looked at one by one. ``cells``:
    values of a batch or a dump that are kept or read.
    """

    values: int
    long: int
    slots: int
    cells: int

    @classmethod
    def within(cls, max_memory: int) -> Room:
        """What fits into ``max_memory`` bytes, or the least that is of use."""
        long = _between(max_memory // PER_VALUE, 1 << 15, 1 << 24)
        return cls(
            values=min(long, 1 << 20),
            long=long,
            slots=_between(max_memory // PER_LOOK, 1 << 14, 1 << 16),
            cells=_between(max_memory // ROWS_SHARE, 1 << 17, 1 << 22),
        )


def _between(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


ROOM = Room.within(DEFAULT)
"""What a check holds unless it is told otherwise."""
