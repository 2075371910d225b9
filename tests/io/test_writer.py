"""Writing tensors: the format, any order of writes, and files that are complete or absent."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from opdtool.core.errors import InputError
from opdtool.io.header import READABLE
from opdtool.io.tensors import TORCH_DTYPES, open_tensors
from opdtool.io.writer import (
    TensorFileWriter,
    TensorSpec,
    check_output,
    save_tensors,
    spec_of,
    write_text_atomic,
)
from tests.io.test_tensors import same, sample, scratch


def listing(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(os.listdir(folder))


def test_the_library_reads_every_dtype_that_we_write(tmp_path: Path) -> None:
    tensors = {f"t_{code}": sample(TORCH_DTYPES[code], (3, 5)) for code in READABLE}
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    written = save_tensors(tmp_path / "a.safetensors", tensors, metadata={"b": "2", "a": "1"})
    loaded = load_file(tmp_path / "a.safetensors")
    assert len(loaded) == len(READABLE) + 2
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"a": "1", "b": "2"}
    with open_tensors(tmp_path / "a.safetensors") as source:
        assert all(same(source.read(name), tensor) for name, tensor in tensors.items())
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert written.size == len(raw)
    assert written.sha256 == hashlib.sha256(raw).hexdigest()


def test_the_bytes_are_those_of_the_format_worked_out_by_hand(tmp_path: Path) -> None:
    tensors = {
        "b": torch.tensor([1, 2], dtype=torch.uint8),
        "a": torch.tensor([3], dtype=torch.int32),
    }
    save_tensors(tmp_path / "a.safetensors", tensors)
    header = (
        b'{"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},'
        b'"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}'
    )
    header += b" " * (-len(header) % 8)
    expected = len(header).to_bytes(8, "little") + header + b"\3\0\0\0" + b"\1\2"
    assert (tmp_path / "a.safetensors").read_bytes() == expected


def test_the_same_tensors_give_the_same_bytes_in_any_order_of_writing(tmp_path: Path) -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(4)
    save_tensors(tmp_path / "1", {"a": a, "b": b}, metadata={"x": "1", "y": "2"})
    with TensorFileWriter(
        tmp_path / "2", [spec_of("b", b), spec_of("a", a)], metadata={"y": "2", "x": "1"}
    ) as writer:
        writer.write("b", b[2:], 2)
        writer.write("a", a[:, 1:], 0, 1)
        writer.write("b", b[:2])
        writer.write("a", a[:, :1])
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_tensor_written_in_blocks_is_that_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    blocks: list[list[tuple[int, int]]] = [[]]
    for cut in cuts:
        pairs = list(itertools.pairwise(cut))
        blocks = [[*block, pair] for block in blocks for pair in pairs]
    blocks = data.draw(st.permutations(blocks))
    whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    path = scratch("blocks.safetensors")
    with TensorFileWriter(path, [spec_of("x", whole)], force=True) as writer:
        for block in blocks:
            part = whole[tuple(slice(*pair) for pair in block)]
            writer.write("x", part, *[first for first, _ in block])
    loaded = load_file(path)
    assert torch.equal(loaded["x"], whole)


def test_views_and_graphs_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    save_tensors(tmp_path / "a", {"t": base.t(), "e": base[:1].expand(5, 4), "s": base[:, ::2]})
    loaded = load_file(tmp_path / "a")
    assert torch.equal(loaded["t"], base.detach().t())
    assert torch.equal(loaded["e"], base.detach()[:1].expand(5, 4))
    assert torch.equal(loaded["s"], base.detach()[:, ::2])


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save_tensors(tmp_path / "a", {"x": torch.ones(1)})
        write_text_atomic(tmp_path / "b", "text", force=False)
    finally:
        os.umask(before)
    for name in ("a", "b"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask
    assert listing(tmp_path) == ["a", "b"]


def test_an_existing_output_is_kept_without_force_and_replaced_with_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    with pytest.raises(InputError, match=r"a: exists; pass --force"):
        save_tensors(tmp_path / "a", {"x": torch.ones(1)})
    with pytest.raises(InputError, match="exists"):
        write_text_atomic(tmp_path / "a", "new", force=False)
    assert (tmp_path / "a").read_text() == "precious"
    save_tensors(tmp_path / "a", {"x": torch.ones(1)}, force=True)
    assert load_file(tmp_path / "a")["x"].item() == 1
    assert listing(tmp_path) == ["a"]


def test_parents_are_made(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x" / "y" / "a", {"x": torch.ones(1)})
    assert load_file(tmp_path / "x" / "y" / "a")["x"].item() == 1


def test_an_output_that_cannot_be_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path, reason in [
        (tmp_path / "folder", "is a directory; name a file in it"),
        (tmp_path / "file" / "a", "a part of the path is a file"),
        (tmp_path / ("n" * 250), "the name is too long"),
        (tmp_path / "a\0b", "not a path"),
        (Path("/dev/null"), "is not a regular file"),
        (Path("/"), "is a directory"),
    ]:
        with pytest.raises(InputError, match=reason):
            save_tensors(path, {"x": torch.ones(1)}, force=True)
    assert listing(tmp_path) == ["file", "folder"]


def test_a_symbolic_link_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    os.symlink(tmp_path / "precious", tmp_path / "out")
    with pytest.raises(InputError, match="exists"):
        save_tensors(tmp_path / "out", {"x": torch.ones(1)})
    save_tensors(tmp_path / "out", {"x": torch.ones(1)}, force=True)
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "out").is_symlink()
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    with pytest.raises(InputError, match="exists"):
        check_output(tmp_path / "dangling", force=False)


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    spec = TensorSpec("x", "F32", (2,))
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="stop"),
        TensorFileWriter(tmp_path / "a", [spec]) as writer,
    ):
        writer.write("x", torch.ones(1))
        assert listing(tmp_path) != []
        raise RuntimeError("stop")
    assert listing(tmp_path) == []


def test_a_file_that_was_not_written_whole_gets_no_name(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="not written whole"),
        TensorFileWriter(tmp_path / "a", [TensorSpec("x", "F32", (2,))]) as writer,
    ):
        writer.write("x", torch.ones(1), 1)
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota"),
        (errno.EIO, "input/output error"),
    ],
)
def test_a_disk_that_fills_up_is_a_sentence_and_leaves_nothing(
    code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        if offset > 4096:
            raise OSError(code, os.strerror(code))
        return real(fd, data[:4096], offset)

    monkeypatch.setattr(os, "pwrite", full)
    save_tensors(tmp_path / "small", {"x": torch.ones(10)})
    with pytest.raises(InputError, match=rf"big: cannot be written: {reason}"):
        save_tensors(tmp_path / "big", {"x": torch.ones(10_000)})
    assert listing(tmp_path) == ["small"]


@pytest.mark.parametrize("call", ["open", "ftruncate", "fsync", "link"])
def test_any_call_that_fails_is_a_sentence_and_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        if call == "link":  # a file system without links: renamed instead
            save_tensors(tmp_path / "a", {"x": torch.ones(1)})
            (tmp_path / "a").unlink()
        else:
            with pytest.raises(InputError, match="a: cannot be written: the file system is read"):
                save_tensors(tmp_path / "a", {"x": torch.ones(1)})
    assert listing(tmp_path) == []


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(InputError, match="appeared while this run was at work"),
        TensorFileWriter(tmp_path / "a", [TensorSpec("x", "F32", (1,))]) as writer,
    ):
        writer.write("x", torch.ones(1))
        (tmp_path / "a").write_text("another's")
    assert (tmp_path / "a").read_text() == "another's"
    assert listing(tmp_path) == ["a"]


def test_two_runs_at_one_file_do_not_mix(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "a", [TensorSpec("x", "F32", (1,))]) as first:
        with pytest.raises(InputError, match="another run is writing it now"):
            TensorFileWriter(tmp_path / "a", [TensorSpec("x", "F32", (1,))], force=True)
        first.write("x", torch.full((1,), 7.0))
    assert load_file(tmp_path / "a")["x"].item() == 7
    assert listing(tmp_path) == ["a"]


def test_blocks_that_do_not_fit_are_a_mistake_of_the_caller(tmp_path: Path) -> None:
    attempts: list[Callable[[TensorFileWriter], None]] = [
        lambda writer: writer.write("x", torch.ones(3, 2)),
        lambda writer: writer.write("x", torch.ones(2)),
        lambda writer: writer.write("x", torch.ones(1, 2), 2),
        lambda writer: writer.write("x", torch.ones(1, 2), -1),
        lambda writer: writer.write("x", torch.ones(2, 2, dtype=torch.float16)),
    ]
    for attempt in attempts:
        with (
            pytest.raises(ValueError, match=r"^x: "),
            TensorFileWriter(tmp_path / "a", [TensorSpec("x", "F32", (2, 2))]) as writer,
        ):
            attempt(writer)
    with pytest.raises(ValueError, match="two tensors of one name"):
        TensorFileWriter(tmp_path / "a", [TensorSpec("x", "F32", (1,))] * 2)
    assert listing(tmp_path) == []


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="complex64 cannot be written"):
        save_tensors(tmp_path / "a", {"x": torch.ones(1, dtype=torch.complex64)})


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    text = json.dumps({"a": "é"}, ensure_ascii=False) + "\n"
    write_text_atomic(tmp_path / "a.json", text, force=False)
    assert (tmp_path / "a.json").read_bytes() == text.encode()


def test_what_is_left_zero_counts_as_written_and_reads_as_zeros(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "a", [TensorSpec("x", "I32", (2, 3))]) as writer:
        assert writer.shape("x") == (2, 3)
        writer.write("x", torch.full((1, 3), 7, dtype=torch.int32), 1)
        writer.leave_zero("x", 3)
    assert load_file(tmp_path / "a")["x"].tolist() == [[0, 0, 0], [7, 7, 7]]
