"""``.npy`` files, for token counts and draft maps. Pickled objects are refused."""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.pread import SourceFile

_MAX_HEADER = 10_000


def is_npy(path: Path) -> bool:
    """Does the name say that it is one?"""
    return path.suffix == ".npy"


def read_npy(path: Path) -> Tensor:
    """The array in a ``.npy`` file, in native byte order and C order.

    Raises:
        InputError: it is none, holds objects, has a dtype that torch lacks, or its size is
            not what its header says.
    """
    file = SourceFile(path)
    try:
        head = io.BytesIO(file.read(0, min(file.size, _MAX_HEADER + 12)))
        shape, fortran, dtype = _header(path, head)
        if dtype.hasobject:
            raise InputError(f"{path}: holds pickled objects, which are never loaded")
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise InputError(f"{path}: dtype {dtype} cannot be read; save integers or floats")
        if len(shape) > 32 or any(type(size) is not int or size < 0 for size in shape):
            raise InputError(f"{path}: shape {str(shape)[:80]} is no list of at most 32 sizes")
        count = math.prod(shape)
        if math.prod(max(size, 1) for size in shape) >= 1 << 60:
            raise InputError(f"{path}: shape {shape} has more elements than can be counted")
        start = head.tell()
        if count * dtype.itemsize != file.size - start:
            raise InputError(
                f"{path}: {plural(file.size - start, 'byte')} of data for {dtype} {list(shape)}, "
                "which "
                f"takes {count * dtype.itemsize}; it is truncated or damaged"
            )
        data = np.empty(count, dtype)
        if data.nbytes:
            file.read_into(data.view(np.uint8).data, start)
        file.check_unchanged()
    finally:
        file.close()
    if dtype.kind == "b" and data.size and data.view(np.uint8).max() > 1:
        raise InputError(f"{path}: a bool that is neither 0 nor 1; it is damaged")
    array = data.reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(np.array(array, dtype.newbyteorder("="), order="C"))


def _header(path: Path, head: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version = np.lib.format.read_magic(head)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(head, max_header_size=_MAX_HEADER)
            if version == (2, 0):
                return np.lib.format.read_array_header_2_0(head, max_header_size=_MAX_HEADER)
    except (MemoryError, RecursionError):
        raise InputError(f"{path}: not a .npy file: its header is nested too deeply") from None
    except Exception as error:  # its literal parser lets many kinds of error through
        words = " ".join(str(error).split())[:120] or type(error).__name__
        raise InputError(f"{path}: not a .npy file: {words}") from None
    raise InputError(f"{path}: .npy version {version}; save it with numpy.save as 1.0 or 2.0")
