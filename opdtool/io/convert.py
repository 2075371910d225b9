"""Torch files to safetensors. Only tensors are loaded: nothing in the file is run."""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.io.flatten import flatten, plain
from opdtool.io.pread import SourceFile
from opdtool.io.writer import TensorFileWriter, WrittenFile, check_output, spec_of

_ZIP = b"PK\x03\x04"
_TAR = (b"./", b"sys_info", b"storages", b"tensors", b"pickle")
_CHUNK = 64 << 20
_EXPANSION = 16
"""A tensor may be this many times the file (an expanded view); more is an attack on the disk."""


def convert(path: Path, output: Path, *, force: bool = False) -> WrittenFile:
    """Write the tensors of a torch file to a safetensors file.

    Names of nested dicts, lists and tuples are joined with dots; a lone tensor is named for
    the file. Tensors that share storage are written each on its own.

    Raises:
        InputError: the file cannot be loaded as tensors alone, holds anything else (the key is
            named), or the output exists without ``force`` or cannot be written.
    """
    check_output(output, force=force)
    size, zipped = _look(path)
    value = _load(path, zipped)

    def leaf(name: str, item: Any) -> Tensor:
        if not isinstance(item, Tensor):
            raise InputError(
                f"{path}: {name or 'the whole file'} is a {type(item).__name__}, not a tensor; "
                "save a dict of tensors alone"
            )
        if item.numel() * item.element_size() > max(_EXPANSION * size, 1 << 30):
            raise InputError(
                f"{path}: {name} is {list(item.shape)}, far more than the file holds; "
                "save it without expanding it"
            )
        try:
            return plain(name, item)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    lone = path.name.split(".")[0] or "tensor"
    tensors = flatten({lone: value} if isinstance(value, Tensor) else value, "", leaf)
    if not tensors:
        raise InputError(f"{path}: holds no tensors")
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    with TensorFileWriter(output, specs, force=force) as writer:
        for name, tensor in tensors.items():
            _write(writer, name, tensor)
    return writer.finish()


def _look(path: Path) -> tuple[int, bool]:
    """The file's size, and whether it is of the kind that can be mapped."""
    file = SourceFile(path)
    try:
        head = file.read(0, min(file.size, 16))
        size = file.size
    finally:
        file.close()
    other = _other_kind(head) or _other_archive(path, head)
    if other:
        raise InputError(f"{path}: not a torch file of tensors: {other}")
    return size, head.startswith(_ZIP)


def _other_kind(head: bytes) -> str:
    """What a file is that begins like this, where it is none of torch's."""
    if not head:
        return "it is empty"
    if head.startswith(b"\x93NUMPY"):
        return "it is a NumPy array; commands that take arrays take it as it is, as .npy"
    if head[8:10] == b'{"':
        return "it is safetensors already; give it to the commands as it is, as .safetensors"
    # A zip archive, a pickle of protocol 2 on, or a tar archive of torch's first years.
    if not head.startswith((_ZIP, b"\x80")) and not head.startswith(_TAR):
        return f"it begins with {head[:8]!r}, which no torch file does"
    return ""


def _other_archive(path: Path, head: bytes) -> str:
    """What a zip archive is, where its names are none of torch's."""
    if not head.startswith(_ZIP):
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return ""  # torch says so too
    if names and all(name.endswith(".npy") for name in names):
        return "it is a NumPy archive; save its arrays as safetensors, or one as .npy"
    return ""


def _load(path: Path, zipped: bool) -> Any:
    """What is in the file, its tensors mapped and not yet read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:  # a broken or hostile file ends in any kind of error
            words = " ".join(str(error).split())
            if re.search(r"[Uu]nsupported (global|class)|GLOBAL |Can only (build|create)", words):
                raise InputError(
                    f"{path}: holds more than tensors, which is never loaded; load it where you "
                    "trust it and save a dict of tensors alone"
                ) from None
            raise InputError(f"{path}: not a torch file of tensors: {_reason(words)}") from None


def _reason(words: str) -> str:
    """What torch says of a broken file, without its advice on trusting files."""
    if "zip archive" in words or "archive" in words:
        return "its zip archive is cut off, broken or not torch's; make the file anew"
    if not words or "Weights only" in words or "pop from" in words:
        return "its pickle is cut off, broken or not torch's; make the file anew"
    return f"{words[:160]}; make the file anew"


def _write(writer: TensorFileWriter, name: str, tensor: Tensor) -> None:
    """Write in pieces, so that a tensor that is not contiguous is never copied whole."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        writer.write(name, tensor)
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    step = max(1, _CHUNK // row_bytes)
    for start in range(0, tensor.shape[0], step):
        writer.write(name, tensor[start : start + step], start)
