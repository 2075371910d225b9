"""Numbers as reconstruct's report shows them."""

from __future__ import annotations

import math

from opdtool.jobs.reconstruct.figures import format_number, number


def test_an_error_of_nothing_has_no_sign() -> None:
    assert format_number(-0.0) == "0"
    assert math.copysign(1, float(number(-0.0))) == 1


def test_other_numbers_keep_theirs_and_words_stay_words() -> None:
    assert [format_number(x) for x in (-0.5, 48740.0, "nan")] == ["-0.5", "4.874e+04", "nan"]
    assert [number(x) for x in (-2.0, math.inf, -math.inf, math.nan)] == [
        -2.0,
        "inf",
        "-inf",
        "nan",
    ]
