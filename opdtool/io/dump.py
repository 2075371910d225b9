"""The hook for a training loop: write what a step computed to a file this tool reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.io.flatten import flatten, plain
from opdtool.io.writer import save_tensors

_RANK = re.compile(r"\.(rank|tp|cp|dp)\d+of\d+(\.|$)")


def dump(path: Path | str, /, **tensors: Any) -> Path:
    """Write tensors to a safetensors file; returns the file's path.

        opdtool.dump("dumps/step10", input_ids=ids, draft_token_mask=mask, cu_seqlens=cu)

    Tensors may be on any device and part of a graph: they are detached and copied. Numbers,
    (nested) lists of numbers and numpy arrays become tensors; the items of a dict are written
    as ``name.key``. An earlier file of the name is replaced, in one step.

    Where torch.distributed has more than one rank, every rank writes its own file,
    ``step10.rank3of8.safetensors``. A name that says already whose part it is, such as
    ``step10.cp0of2``, is kept as it is: let then only one rank of each part call.

    Raises:
        InputError: nothing to write, a value that is no tensor, or a file that cannot be
            written.
    """
    target = dump_name(path, *_rank_and_size())
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        made = _tensors(name, value)
        twice = sorted(found.keys() & made)
        if twice:
            raise InputError(
                f"{target}: two tensors would both be named {twice[0]}; pass one by another name"
            )
        found |= made
    if not found:
        raise InputError(f"{target}: nothing to dump; pass tensors by name")
    save_tensors(target, found, force=True)
    return target


def dump_name(path: Path | str, rank: int = 0, size: int = 1) -> Path:
    """The name of one rank's file: ``NAME.rank3of8.safetensors``, or plain for a single rank."""
    path = Path(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".npy"):
        raise InputError(f"{path}: dumps are safetensors; name it {path.with_suffix('')}")
    stem = path.name.removesuffix(".safetensors")
    if not stem:
        raise InputError(f"{path}: not a name to write to")
    if size > 1 and not _RANK.search(stem):
        stem += f".rank{rank}of{size}"
    return path.with_name(f"{stem}.safetensors")


def _rank_and_size() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _tensors(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors of one argument. A list is one tensor when it is one of numbers."""
    if isinstance(value, (list, tuple)) and not any(
        isinstance(item, (Tensor, dict)) for item in value
    ):
        value = _leaf(name, value)
    return flatten({name: value}, "", _leaf)


def _leaf(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return plain(name, value)
    if value is None:
        raise InputError(f"{name} is None; leave it out of the dump")
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name}: a list of uneven lists; pad it first") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise InputError(f"{name}: a {type(value).__name__} is no tensor; pass numbers or tensors")
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
