"""``.npy`` files: what is read, and that nothing in them is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.io.npy import is_npy, read_npy


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "i1", "<u2", "<i4", ">i4", "<i8", ">i8", "<u8", "<f2", "<f4", ">f8"]
)
def test_arrays_are_read_by_value(dtype: str, tmp_path: Path) -> None:
    array = (np.arange(12).reshape(3, 4) % 5).astype(dtype)
    for name, stored in {"c": array, "f": np.asfortranarray(array), "v": array[::2, ::-1]}.items():
        np.save(tmp_path / f"{name}.npy", stored)
        tensor = read_npy(tmp_path / f"{name}.npy")
        assert tensor.is_contiguous()
        assert tensor.tolist() == stored.tolist()
        assert tensor.dtype.itemsize == array.dtype.itemsize


def test_scalars_and_empty_arrays_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.int64(3))
    np.save(tmp_path / "e.npy", np.empty((0, 2), np.float32))
    assert read_npy(tmp_path / "s.npy").item() == 3
    assert read_npy(tmp_path / "e.npy").shape == (0, 2)
    assert read_npy(tmp_path / "e.npy").dtype == torch.float32
    assert is_npy(tmp_path / "e.npy")


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    array = np.empty(1, object)
    array[0] = Trap(tmp_path / "sprung")
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(InputError, match=r"a\.npy: holds pickled objects"):
        read_npy(tmp_path / "a.npy")
    with pytest.raises(InputError, match=r"b\.npy: not a \.npy file"):
        read_npy(tmp_path / "b.npy")
    assert not (tmp_path / "sprung").exists()
    np.load(tmp_path / "a.npy", allow_pickle=True)
    assert (tmp_path / "sprung").exists()  # it was a trap
