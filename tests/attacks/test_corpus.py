"""Every hostile file is refused with its own name and its reason, and nothing else happens."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from opdtool.core.errors import InputError
from opdtool.io.npy import read_npy
from opdtool.io.tensors import open_tensors
from tests.attacks.make_corpus import GOOD, Case, corpus, entry, million, npy_corpus, of

CORPUS, NPY = corpus(), npy_corpus()

STRICTER = frozenset(
    {
        # The library reads these; a name that clears the screen, or that no tool could have
        # written, is worth a refusal.
        "name-empty",
        "name-of-1025",
        "name-of-1000000",
        "name-escape",
        "name-newline",
        "name-nul",
        "name-right-to-left",
        "metadata-null",
        "rank-65",
        "shape-overflows-to-zero",
        "text-space-first",
        "name-twice",
    }
)


def test_the_corpus_is_large_and_its_names_differ() -> None:
    assert len(CORPUS) + len(NPY) > 120
    assert len({case.name for case in CORPUS}) == len(CORPUS)
    assert len({case.name for case in NPY}) == len(NPY)
    assert {case.name for case in CORPUS} >= STRICTER
    assert sum(case.reason == "" for case in CORPUS) >= 10


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_a_hostile_file_is_refused_by_name_and_reason(case: Case, tmp_path: Path) -> None:
    path = tmp_path / f"{case.name}.safetensors"
    case.write(path)
    if not case.reason:
        with open_tensors(path) as source:
            assert all(source.read(name).numel() >= 0 for name in source.names())
        return
    with pytest.raises(InputError) as refusal:
        open_tensors(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert case.reason in message
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_what_the_library_refuses_we_refuse(case: Case, tmp_path: Path) -> None:
    path = tmp_path / f"{case.name}.safetensors"
    case.write(path)
    try:
        with safe_open(path, "pt") as file:
            list(file.keys())
        refused = False
    except (SafetensorError, OSError, ValueError, OverflowError, UnicodeError):
        refused = True
    if refused:
        assert case.reason
    elif case.reason:
        assert case.name in STRICTER


@pytest.mark.parametrize("case", NPY, ids=lambda case: case.name)
def test_a_hostile_array_is_refused_by_name_and_reason(case: Case, tmp_path: Path) -> None:
    path = tmp_path / f"{case.name}.npy"
    case.write(path)
    if not case.reason:
        assert read_npy(path).tolist() == [0]
        return
    with pytest.raises(InputError) as refusal:
        read_npy(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert re.search(case.reason.replace("(", r"\(").replace(")", r"\)"), message)
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F8_E8M0", "C64"])
def test_a_dtype_that_we_cannot_read_spoils_only_its_own_tensor(dtype: str, tmp_path: Path) -> None:
    bits = {"F4": 4, "F6_E2M3": 6, "F8_E8M0": 8, "C64": 64}[dtype]
    path = tmp_path / "a.safetensors"
    tensors = {"odd": entry(dtype, [8], 0, bits), "x": entry("U8", [1], bits, bits + 1)}
    of(tensors, b"\5" * (bits + 1))(path)
    with open_tensors(path) as source:
        assert source.info("odd").shape == (8,)
        assert source.read("x").tolist() == [5]
        with pytest.raises(InputError, match=rf"a\.safetensors: odd has dtype {dtype}, wh"):
            source.read("odd")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    of(GOOD, b"\0" * 8)(path)
    whole = path.read_bytes()
    assert len(whole) > 60
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"a\.safetensors: "):
            open_tensors(path)


def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    """Under a limit on memory, a huge shape is a refusal and not a failed allocation."""
    path = tmp_path / "a.safetensors"
    of({"x": entry("F64", [1 << 40], 0, 1 << 43)}, b"\0" * 8)(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="truncated"):
        open_tensors(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.slow
def test_a_million_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    million().write(path)
    begin = time.perf_counter()
    with open_tensors(path) as source:
        assert len(source) == 10**6
        assert torch.equal(source.read("t999999"), torch.ones(1, dtype=torch.uint8))
        with pytest.raises(InputError, match="no tensor absent"):
            source.read("absent")
    assert time.perf_counter() - begin < 120  # linear: seconds; quadratic: hours
