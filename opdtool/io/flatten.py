"""Nested names as dotted ones, and tensors in the plain form that a file can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.io.header import MAX_NAME
from opdtool.io.writer import dtype_code

MAX_DEPTH = 64


def flatten(value: Any, name: str, leaf: Callable[[str, Any], Tensor]) -> dict[str, Tensor]:
    """Every tensor of nested mappings, lists and tuples, by its dotted name.

    ``leaf`` makes a tensor of what is none of those, or refuses it.

    Raises:
        InputError: two tensors get one name, a name cannot be written, or it nests too deep.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in _leaves(value, name, leaf, 0):
        if not key or len(key) > MAX_NAME or not key.isprintable() or key == "__metadata__":
            raise InputError(f"{ascii(key)[:80]} cannot be the name of a tensor; rename it")
        if key in found:
            raise InputError(f"two tensors would both be named {key}; rename one")
        found[key] = tensor
    return found


def _leaves(
    value: Any, name: str, leaf: Callable[[str, Any], Tensor], depth: int
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        yield name, leaf(name, value)
        return
    if depth == MAX_DEPTH:
        raise InputError(f"{name[:80]} nests deeper than {MAX_DEPTH}; flatten it first")
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else key, leaf, depth + 1)


def plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor detached, with its values in memory, or a refusal that says why not.

    Raises:
        InputError: it is sparse, quantised, without data, spread over ranks, or of a dtype
            that the format lacks.
    """
    tensor = tensor.detach()
    if type(tensor).__name__ == "DTensor":
        raise InputError(f"{name} is a DTensor; pass .to_local() or .full_tensor() of it")
    if tensor.layout != torch.strided:
        raise InputError(f"{name} is {tensor.layout}; pass .to_dense() of it")
    if tensor.is_quantized:
        raise InputError(f"{name} is quantised; pass .dequantize() of it")
    if tensor.is_meta:
        raise InputError(f"{name} is on the meta device and has no data")
    try:
        dtype_code(tensor.dtype)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return tensor.resolve_neg()
