"""Sizes that nobody can have meant: the last that is taken and the first that is not."""

from __future__ import annotations

import pytest

from opdtool.core.errors import InputError
from opdtool.core.limits import check_ranks, check_slots


def test_as_many_slots_as_int32_counts_are_taken() -> None:
    check_slots("--pad-packed-to asks for", 2_147_483_647)
    with pytest.raises(InputError, match=r"^--x asks for 2147483648 slots, more than int32"):
        check_slots("--x asks for", 2_147_483_648)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1_048_576), (1024, 1024), (1_048_576, 1)])
def test_a_million_ranks_are_taken_and_one_more_are_not(tp: int, cp: int) -> None:
    check_ranks(tp, cp)
    with pytest.raises(InputError, match=f"TP {tp} x CP {cp + 1} are more than 1,048,576 ranks"):
        check_ranks(tp, cp + 1)
