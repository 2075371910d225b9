"""The message of a refusal."""

from __future__ import annotations

import pickle

from opdtool.core.errors import InputError


def test_what_a_terminal_would_obey_is_escaped() -> None:
    error = InputError("no tensor a\x1b[31mb\x7f\u202e in é;\ntwo lines")
    assert str(error) == "no tensor a\\x1b[31mb\\x7f\\u202e in é;\ntwo lines"


def test_a_refusal_travels_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(InputError("a\x7f")))) == "a\\x7f"
