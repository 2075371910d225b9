"""Reading tensors: the values, only the bytes that are needed, names, and what is refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from opdtool.core.errors import InputError
from opdtool.io.header import READABLE
from opdtool.io.pread import SourceFile
from opdtool.io.tensors import TORCH_DTYPES, check_renames, open_tensors

Count = Callable[[], int]


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements differ, in any dtype."""
    count = int(np.prod(shape))
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    if dtype.is_floating_point:
        return (torch.arange(count, dtype=torch.float32) % 13 - 6).to(dtype).reshape(shape)
    return (torch.arange(count) % 100).to(dtype).reshape(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bytes, dtype and shape."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(raw[0], raw[1])


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Counts the bytes that are asked of the system."""
    counted = [0]
    real = SourceFile.read_into

    def counting(self: SourceFile, view: memoryview, offset: int) -> None:
        counted[0] += view.nbytes
        real(self, view, offset)

    monkeypatch.setattr(SourceFile, "read_into", counting)
    return lambda: counted[0]


@pytest.mark.parametrize("code", READABLE)
def test_every_dtype_that_the_library_writes_is_read_as_it_was(code: str, tmp_path: Path) -> None:
    tensors = {
        "matrix": sample(TORCH_DTYPES[code], (5, 7)),
        "scalar": sample(TORCH_DTYPES[code], ()),
        "empty": sample(TORCH_DTYPES[code], (0, 3)),
    }
    assert len({str(item) for item in tensors["matrix"].reshape(-1).tolist()}) > 1
    save_file(tensors, tmp_path / "a.safetensors", metadata={"made": "by hand"})
    with open_tensors(tmp_path / "a.safetensors") as source:
        assert source.names() == ["empty", "matrix", "scalar"]
        assert source.metadata() == {"made": "by hand"}
        for name, tensor in tensors.items():
            assert source.info(name).dtype == code
            assert same(source.read(name), tensor)
        assert same(source.read("matrix", slice(1, 4), slice(2, 7)), tensors["matrix"][1:4, 2:7])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_of_any_array_is_what_numpy_cuts(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    box = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n))) for n in shape]
    slices = tuple(slice(min(pair), max(pair)) for pair in box)
    slices = slices[: data.draw(st.integers(0, len(slices)))]
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    path = scratch("box.safetensors")
    save_file({"x": whole}, path)
    with open_tensors(path) as source:
        assert same(source.read("x", *slices), whole[slices])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows_in_any_order_are_what_numpy_picks(data: st.DataObject) -> None:
    count, width = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 3, 1500, 9000]))
    rows = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=50)), np.int64)
    first = data.draw(st.integers(0, width))
    columns = data.draw(st.sampled_from([None, slice(first, width)]))
    whole = torch.arange(count * width, dtype=torch.int32).reshape(count, width)
    path = scratch("rows.safetensors")
    save_file({"x": whole}, path)
    expected = whole[rows] if columns is None else whole[rows][:, columns]
    with open_tensors(path) as source:
        assert same(source.read_rows("x", rows, columns), expected)


_FOLDER = tempfile.TemporaryDirectory(prefix="opdtool-tests-")  # removed at exit


def scratch(name: str) -> Path:
    """A path for the examples of one test, each of which writes it anew."""
    return Path(_FOLDER.name) / name


def test_pieces_of_a_tensor_cover_it_in_order(tmp_path: Path) -> None:
    whole = torch.arange(35, dtype=torch.int16).reshape(5, 7)
    save_file({"x": whole}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors") as source:
        pieces = list(source.chunks("x", 16))
    assert [start for start, _ in pieces] == [0, 8, 16, 24, 32]
    assert torch.equal(torch.cat([piece for _, piece in pieces]), whole.reshape(-1))


def test_a_vocabulary_window_reads_that_window_and_no_more(
    tmp_path: Path, bytes_read: Count
) -> None:
    save_file({"logits": torch.zeros(2, 8, 40_000)}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors") as source:
        before = bytes_read()
        window = source.read("logits", slice(1, 2), slice(2, 6), slice(10_000, 20_000))
        assert window.shape == (1, 4, 10_000)
        assert bytes_read() - before == 4 * 10_000 * 4


def test_rows_far_apart_are_read_alone(tmp_path: Path, bytes_read: Count) -> None:
    save_file({"x": torch.zeros(1000, 1000)}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors") as source:
        before = bytes_read()
        source.read_rows("x", np.array([900, 3], np.int64))
        assert bytes_read() - before == 2 * 1000 * 4


def test_a_rename_gives_a_tensor_its_canonical_name(tmp_path: Path) -> None:
    save_file({"loss_mask": torch.ones(3), "ids": torch.zeros(2)}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors", rename={"token_mask": "loss_mask"}) as source:
        assert source.names() == ["ids", "token_mask"]
        assert torch.equal(source.read("token_mask"), torch.ones(3))
        assert source.original_name("token_mask") == "loss_mask"
        assert "loss_mask" not in source
        assert source.used_renames == {"token_mask"}


def test_two_names_can_be_swapped(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors", rename={"a": "b", "b": "a"}) as source:
        assert source.read("a").item() == 1
        assert source.read("b").item() == 0


@pytest.mark.parametrize(
    ("rename", "reason"),
    [
        ({"token_mask": "los_mask"}, "no los_mask; it holds loss_mask"),
        ({"ids": "loss_mask"}, "there is a ids already"),
        ({"x": "ids", "y": "ids"}, "two names"),
    ],
)
def test_a_rename_that_cannot_be_is_refused(
    rename: dict[str, str], reason: str, tmp_path: Path
) -> None:
    save_file({"loss_mask": torch.ones(3), "ids": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=reason):
        open_tensors(tmp_path / "a.safetensors", rename=rename)


def test_a_rename_for_two_inputs_must_fit_one_of_them(tmp_path: Path) -> None:
    save_file({"m": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"n": torch.ones(3)}, tmp_path / "b.safetensors")
    rename = {"mask": "m"}
    one = open_tensors(tmp_path / "a.safetensors", rename=rename, strict_rename=False)
    two = open_tensors(tmp_path / "b.safetensors", rename=rename, strict_rename=False)
    assert "mask" in one
    assert "mask" not in two
    check_renames(rename, one, two)
    with pytest.raises(InputError, match="no input has a tensor m"):
        check_renames(rename, two)


def test_a_missing_tensor_is_refused_with_what_is_there_and_the_rename(tmp_path: Path) -> None:
    save_file({"loss_mask": torch.ones(3), "ids": torch.zeros(2)}, tmp_path / "a.safetensors")
    with (
        open_tensors(tmp_path / "a.safetensors") as source,
        pytest.raises(InputError) as refusal,
    ):
        source.read("token_mask")
    message = str(refusal.value)
    assert str(tmp_path / "a.safetensors") in message
    assert "loss_mask" in message
    assert "--rename token_mask=THEIRS" in message


def test_several_files_are_one_source_and_a_name_in_two_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with open_tensors(paths) as source:
        assert source.names() == ["a", "b"]
        assert source.path_of("b") == paths[1]
    with open_tensors(tmp_path) as source:
        assert source.names() == ["a", "b"]
    with pytest.raises(InputError, match=r"tensor a is in .* too"):
        open_tensors([paths[0], paths[0]])


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".PT"])
def test_a_pickle_is_refused_with_the_command_that_converts_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"a": torch.ones(1)}, path)
    for asked in (path, tmp_path):
        with pytest.raises(InputError) as refusal:
            open_tensors(asked)
        target = tmp_path / "model.safetensors"
        assert f"opdtool convert {path} -o {target}" in str(refusal.value)


def test_a_pickle_under_a_wrong_name_is_told_apart(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="one of torch under its name"):
        open_tensors(tmp_path / "a.safetensors")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path, reason in [
        (tmp_path / "none.safetensors", "no such file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "folder", "holds no .safetensors file"),
        (Path("a\0b"), "not a path"),
        (tmp_path / ("n" * 300), "name too long"),
        (tmp_path / "folder" / "x" / "y", "no such file"),
    ]:
        with pytest.raises(InputError, match=reason):
            open_tensors(path)
    with pytest.raises(InputError, match="no input file"):
        open_tensors([])


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1000)}, path)
    os.utime(path, (1e9, 1e9))  # the system's clock of changes ticks in milliseconds
    with open_tensors(path) as source:
        assert source.read("x").sum() == 0
        with path.open("r+b") as file:
            file.seek(500)
            file.write(b"changed")
        with pytest.raises(InputError, match=r"a\.safetensors: changed while being read"):
            source.read("x")
        with pytest.raises(InputError, match="changed"):
            source.unchanged()


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1000)}, path)
    with open_tensors(path) as source:
        os.truncate(path, 200)
        with pytest.raises(InputError, match=r"a\.safetensors: ends at byte 200"):
            source.read("x")


def test_a_replaced_file_is_still_read_as_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(10)}, path)
    save_file({"x": torch.ones(10)}, tmp_path / "new")
    with open_tensors(path) as source:
        os.replace(tmp_path / "new", path)
        assert source.read("x").sum() == 0


def test_a_bool_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"t2d": torch.ones(4, dtype=torch.bool)}, path)
    raw = bytearray(path.read_bytes())
    raw[-1] = 7
    path.write_bytes(raw)
    with open_tensors(path) as source, pytest.raises(InputError, match=r"t2d is BOOL.*byte 7"):
        source.read("t2d")


def test_memory_that_was_read_outlives_the_source(tmp_path: Path) -> None:
    save_file({"x": torch.arange(5)}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors") as source:
        kept = source.read("x")
    os.truncate(tmp_path / "a.safetensors", 0)
    assert kept.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="is closed"):
        source.read("x")


def test_slices_that_a_file_cannot_answer_are_a_mistake_of_the_caller(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4, 4)}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors") as source:
        attempts: list[Callable[[], object]] = [
            lambda: source.read("x", slice(None), slice(None), slice(None)),
            lambda: source.read("x", slice(None, None, 2)),
            lambda: source.read_rows("x", np.array([4], np.int64)),
            lambda: source.read_rows("x", np.array([-1], np.int64)),
            lambda: source.read_flat("x", 0, 17),
        ]
        for attempt in attempts:
            with pytest.raises(ValueError, match=r"x|step") as refusal:
                attempt()
            assert not isinstance(refusal.value, InputError)


def test_a_row_asked_for_twice_is_read_twice(tmp_path: Path) -> None:
    whole = torch.arange(10).reshape(5, 2)
    save_file({"x": whole}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors") as source:
        read = source.read_rows("x", np.array([1, 1, 3], np.int64))
    assert read.tolist() == [[2, 3], [2, 3], [6, 7]]


@pytest.mark.parametrize("length", [0x0280, 0x0280 + 8, 0x4B50])
def test_a_header_length_that_looks_like_another_format_is_read(
    tmp_path: Path, length: int
) -> None:
    # 0x0280 = 640 begins with the bytes of a pickle, 0x4B50 with those of a zip archive.
    header = b'{"x":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}'.ljust(length)
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header + (7).to_bytes(8, "little"))
    with open_tensors([path]) as source:
        assert source.read("x").tolist() == [7]
