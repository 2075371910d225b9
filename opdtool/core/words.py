"""Numbers in sentences."""

from __future__ import annotations


def plural(number: int, word: str, spec: str = "") -> str:
    """The number and the word that goes with it; ``spec`` is a format of the number.

    plural(1, "row") -> 1 row    plural(2, "entry") -> 2 entries    plural(0, "batch") -> 0 batches
    """
    if number == 1:
        ending = ""
    elif word.endswith("y") and word[-2] not in "aeiou":
        word, ending = word[:-1], "ies"
    else:
        ending = "es" if word.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:{spec}} {word}{ending}"
