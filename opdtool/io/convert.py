"""Torch files to safetensors. Only tensors are loaded: nothing in the file is run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.io.flatten import flatten, plain
from opdtool.io.pread import SourceFile
from opdtool.io.writer import TensorFileWriter, WrittenFile, check_output, spec_of

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
        return file.size, file.read(0, min(file.size, 4)) == b"PK\x03\x04"
    finally:
        file.close()


def _load(path: Path, zipped: bool) -> Any:
    """What is in the file, its tensors mapped and not yet read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:  # a broken or hostile file ends in any kind of error
            words = " ".join(str(error).split())
            if "weights_only" in words or "Unsupported" in words or "GLOBAL" in words:
                raise InputError(
                    f"{path}: holds more than tensors, which is never loaded; load it where you "
                    "trust it and save a dict of tensors alone"
                ) from None
            raise InputError(f"{path}: not a torch file of tensors: {words[:160]}") from None


def _write(writer: TensorFileWriter, name: str, tensor: Tensor) -> None:
    """Write in pieces, so that a tensor that is not contiguous is never copied whole."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        writer.write(name, tensor)
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    step = max(1, _CHUNK // row_bytes)
    for start in range(0, tensor.shape[0], step):
        writer.write(name, tensor[start : start + step], start)
