"""What travels between the ranks of a check, and how it is put together again."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from opdtool.cli.main import run
from opdtool.jobs.ranked import dump_sizes, interleaved, pack_up, unpack_with

FIXTURES = Path(__file__).parents[2] / "fixtures"


@dataclass
class OpenFile:
    """Stands for what cannot travel."""

    name: str

    def __reduce__(self) -> str:
        raise TypeError("an open file stays here")


@dataclass
class Verdict:
    """Stands for what a check found."""

    count: int
    read: partial[str]


def _read(file: OpenFile, row: int) -> str:
    return f"{file.name} {row}"


def test_a_verdict_refers_to_the_other_process_s_own_files() -> None:
    here, there = OpenFile("here"), OpenFile("there")
    verdicts = [Verdict(3, partial(_read, here)), Verdict(4, partial(_read, here))]
    with pytest.raises(TypeError, match="stays here"):
        pickle.dumps(verdicts)
    received = unpack_with(pack_up(verdicts, {"file": here}), {"file": there})
    assert [verdict.count for verdict in received] == [3, 4]
    assert [verdict.read(7) for verdict in received] == ["there 7", "there 7"]
    assert received[0].read.args[0] is there


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_items_that_were_dealt_out_come_back_in_their_order(ranks: int) -> None:
    items = list("abcdefg")
    shares = [items[rank::ranks] for rank in range(ranks)]
    assert interleaved(shares) == items


def test_the_ranks_of_a_check_are_the_dump_s_own_unless_options_say(tmp_path: Path) -> None:
    batch, packs = FIXTURES / "batch.safetensors", tmp_path / "packs"
    assert run(["pack", str(batch), "--tp", "2", "--cp", "4", "-o", str(packs), "-q"]) == 0
    loose = sorted(packs.glob("*.safetensors"))
    assert len(loose) == 4
    assert dump_sizes([packs], None, None) == (2, 4)
    assert dump_sizes([packs], 3, None) == (3, 4)
    assert dump_sizes(loose, None, None) == (1, 4)
    assert dump_sizes(loose[:1], None, None) == (1, 1)  # files are missing: the command says so
    assert dump_sizes([batch], None, 2) == (1, 2)
