"""Numbers and their words."""

from __future__ import annotations

from opdtool.core.words import plural


def test_one_is_singular_and_all_else_is_plural() -> None:
    assert [plural(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_the_plural_is_spelt_as_english_has_it() -> None:
    words = ("entry", "day", "batch", "suffix", "process", "place")
    assert [plural(2, word) for word in words] == [
        "2 entries", "2 days", "2 batches", "2 suffixes", "2 processes", "2 places",
    ]  # fmt: skip
    assert plural(1, "entry") == "1 entry"


def test_the_number_is_formatted_as_asked() -> None:
    assert plural(4096, "slot") == "4096 slots"
    assert plural(4096, "slot", ",") == "4,096 slots"
