"""What the user may have meant, and what was written, in words for one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CLEAR = 0.1
"""Words less like than the likest by more than this, on difflib's scale to 1, are left out."""


def nearest(word: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known words most like ``word``, the likest first; none when none is like it.

    One that is clearly the likest is alone: ``formt`` is ``format``, not also ``norm``.
    """
    import difflib  # wanted only for what was misspelt

    by_fold = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_fold, n=most, cutoff=0.5)
    scores = [_likeness(word.lower(), name) for name in close]
    return [
        by_fold[name]
        for name, score in zip(close, scores, strict=True)
        if score >= scores[0] - CLEAR
    ]


def _likeness(word: str, name: str) -> float:
    import difflib

    # The second text is the one that difflib compares many others with.
    return difflib.SequenceMatcher(None, name, word).ratio()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean a or b?``, or nothing when nothing is like it."""
    close = nearest(word, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def short(value: Any, most: int = 60) -> str:
    """A value from a file as one short printable text."""
    text = repr(value)
    text = text if text.isprintable() else ascii(value)
    return text if len(text) <= most else text[: most - 3] + "..."
