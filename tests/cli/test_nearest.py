"""What is offered for a misspelt word."""

from __future__ import annotations

import pytest

from opdtool.cli.nearest import did_you_mean

OPTIONS = ("format", "norm", "force", "atol", "rtol", "max-tokens")
FAULTS = ("mask-shifted", "mask-not-shifted", "mask-shifted-twice", "mask-shifted-right")


@pytest.mark.parametrize(
    ("word", "known", "likest"),
    [
        ("formt", OPTIONS, "format"),
        ("FORMT", OPTIONS, "format"),
        ("atoll", OPTIONS, "atol"),
        ("mask-shift", FAULTS, "mask-shifted"),
        ("mask-not-shiftd", FAULTS, "mask-not-shifted"),
    ],
)
def test_what_is_clearly_the_likest_is_offered_alone(
    word: str, known: tuple[str, ...], likest: str
) -> None:
    assert did_you_mean(word, known) == f"; did you mean {likest}?"


def test_words_that_are_as_like_are_all_offered() -> None:
    assert did_you_mean("tol", OPTIONS) in {
        "; did you mean atol or rtol?",
        "; did you mean rtol or atol?",
    }
    assert did_you_mean("build", ("build-d2t", "build-mask")) == (
        "; did you mean build-d2t or build-mask?"
    )


def test_nothing_is_offered_where_nothing_is_like_it() -> None:
    assert did_you_mean("zzzz", OPTIONS) == ""
