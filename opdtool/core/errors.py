"""The one exception that says: this input is refused, and here is how to mend it."""


class InputError(ValueError):
    """An input, a geometry or an option that opdtool refuses.

    The message is the whole story for the user: what, where, what was found, what was
    expected, what to do, in one or two lines. The command line prints it and exits 2.
    Anything else that escapes a command is an internal error and exits 3.
    """
