"""The dump hook: what may be passed, and what the file is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import opdtool
from opdtool.core.errors import InputError
from opdtool.io.dump import dump_name


def test_tensors_numbers_lists_and_arrays_are_written_by_value(tmp_path: Path) -> None:
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    path = opdtool.dump(
        tmp_path / "step10",
        graph=(leaf * 2).t(),
        half=leaf.bfloat16(),
        flags=[True, False],
        counts=[1, 2, 3],
        nested=[[1.5], [2.5]],
        number=7,
        array=np.arange(4, dtype=">i4"),
        heads={"0": torch.ones(1), 1: torch.zeros(1)},
        several=[torch.ones(2), torch.zeros(3)],
        none_in=[],
        path=torch.ones(1),
    )
    assert path == tmp_path / "step10.safetensors"
    found = load_file(path)
    assert sorted(found) == [
        "array", "counts", "flags", "graph", "half", "heads.0", "heads.1", "nested", "none_in",
        "number", "path", "several.0", "several.1",
    ]  # fmt: skip
    assert torch.equal(found["graph"], (leaf * 2).t().detach())
    assert found["half"].dtype == torch.bfloat16
    assert found["flags"].tolist() == [True, False]
    assert found["counts"].tolist() == [1, 2, 3]
    assert found["counts"].dtype == torch.int64
    assert found["nested"].tolist() == [[1.5], [2.5]]
    assert found["number"].item() == 7
    assert found["array"].tolist() == [0, 1, 2, 3]


def test_a_dump_replaces_the_one_before(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        opdtool.dump(tmp_path / "a.safetensors", x=torch.tensor(value))
    assert load_file(tmp_path / "a.safetensors")["x"].item() == 2.0
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "x is None; leave it out"),
        ("text", "a str is no tensor"),
        (object(), "a object is no tensor"),
        (1 + 2j, "a complex is no tensor"),
        ([[1], [1, 2]], "uneven lists"),
        (torch.ones(2).to_sparse(), "pass .to_dense()"),
        (torch.ones(2, device="meta"), "meta device"),
        (torch.ones(2, dtype=torch.complex64), "x: torch.complex64 cannot be written"),
        ({"a": {"b": None}}, "x.a.b is None"),
        ({"": torch.ones(1), "a": "b"}, "a str is no tensor"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        opdtool.dump(tmp_path / "a", x=value)
    assert reason in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_dump_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to dump"):
        opdtool.dump(tmp_path / "a")
    with pytest.raises(InputError, match="dumps are safetensors"):
        opdtool.dump(tmp_path / "a.pt", x=1)


def test_names_tell_the_rank_where_there_are_several() -> None:
    cases = {
        ("d/step10", 0, 1): "d/step10.safetensors",
        ("d/step10.safetensors", 3, 8): "d/step10.rank3of8.safetensors",
        ("d/v1.5", 3, 8): "d/v1.5.rank3of8.safetensors",
        ("d/step10.cp0of2.safetensors", 3, 8): "d/step10.cp0of2.safetensors",
        ("d/step10.tp1of2.cp0of2", 3, 8): "d/step10.tp1of2.cp0of2.safetensors",
    }
    for (path, rank, size), expected in cases.items():
        assert str(dump_name(path, rank, size)) == expected


RANKS = """
import os, sys, torch, opdtool
rank = int(sys.argv[1])
store = f"file://{sys.argv[2]}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
opdtool.dump(f"{sys.argv[2]}/step", x=torch.full((2,), float(rank)))
torch.distributed.barrier()
os._exit(0)
"""


def test_every_rank_writes_its_own_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANKS]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    for rank in range(2):
        found = load_file(tmp_path / f"step.rank{rank}of2.safetensors")
        assert found["x"].tolist() == [rank, rank]


def test_two_arguments_that_become_one_name_are_refused_and_none_is_lost(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"both be named a\.b; pass one by"):
        opdtool.dump(tmp_path / "d", **{"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []
