"""The one exception that says: this input is refused, and here is how to mend it."""

from __future__ import annotations


class InputError(ValueError):
    """An input, a geometry or an option that opdtool refuses.

    The message is the whole story for the user: what, where, what was found, what was
    expected, what to do, in one or two lines. The command line prints it and exits 2.
    Anything else that escapes a command is an internal error and exits 3.

    Names in it may come from a hostile file: what a terminal would obey is escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
        )
