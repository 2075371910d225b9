"""How many real tokens each row of a batch file has, and masks that are finite."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.io.tensors import TensorSource

LengthsFrom = Literal["input_lengths", "attention_mask", "width"]
Ints = npt.NDArray[np.int64]
_CHUNK = 2 << 20
"""Elements of a mask that are looked at together."""


def read_lengths(
    source: TensorSource, path: Path, rows: int, width: int
) -> tuple[Ints, LengthsFrom]:
    """Real tokens of every row of one file, [rows] int64, and what said so.

    ``input_lengths``, else ``attention_mask``, else the width of the rows. Where both are
    there they are compared.

    Raises:
        InputError: lengths that are not integers, negative or past the width; a mask that is
            no right-padded prefix; two that contradict each other. The row is named.
    """
    given = _given_lengths(source, path, rows, width) if "input_lengths" in source else None
    counted = _mask_lengths(source, path, rows, width) if "attention_mask" in source else None
    if given is None:
        if counted is None:
            return np.full(rows, width, np.int64), "width"
        return counted, "attention_mask"
    if counted is not None and not np.array_equal(given, counted):
        row = int(np.flatnonzero(given != counted)[0])
        raise InputError(
            f"{path}: input_lengths[{row}] is {given[row]}, but attention_mask row {row} has "
            f"{counted[row]} real tokens; store the one that is right"
        )
    return given, "input_lengths"


def _given_lengths(source: TensorSource, path: Path, rows: int, width: int) -> Ints:
    info = source.info("input_lengths")
    if info.shape != (rows,):
        raise InputError(
            f"{path}: input_lengths is {list(info.shape)}; [{rows}] is expected, one length a row"
        )
    if info.dtype[0] not in "IU":
        raise InputError(f"{path}: input_lengths is {info.dtype}; an integer dtype is expected")
    raw = source.read("input_lengths").numpy()
    bad = (
        np.flatnonzero((raw < 0) | (raw > width))
        if raw.dtype.kind == "i"
        else (np.flatnonzero(raw > width))
    )
    if len(bad):
        row = int(bad[0])
        if raw[row] < 0:
            raise InputError(
                f"{path}: input_lengths[{row}] is {raw[row]}; a length in 0..{width} is expected"
            )
        raise InputError(
            f"{path}: input_lengths[{row}] is {raw[row]}, past the row width {width} of input_ids; "
            "pass the lengths before padding, or --rename input_lengths=..."
        )
    return raw.astype(np.int64)


def _mask_lengths(source: TensorSource, path: Path, rows: int, width: int) -> Ints:
    info = source.info("attention_mask")
    if info.shape != (rows, width):
        raise InputError(
            f"{path}: attention_mask is {list(info.shape)}; [{rows}, {width}] is expected"
        )
    lengths = np.empty(rows, np.int64)
    step = max(1, _CHUNK // width)
    for first in range(0, rows, step):
        stored = source.read("attention_mask", slice(first, first + step))
        if stored.dtype.is_floating_point and stored.dtype.itemsize == 1:
            stored = stored.float()  # torch compares no float8
        mask = stored != 0
        odd = _first_place(stored != mask.to(stored.dtype))
        if odd is not None:
            raise InputError(
                f"{path}: attention_mask row {first + odd[0]} has {stored[odd].item()} at "
                f"position {odd[1]}; 0 and 1 are expected"
            )
        gap = _first_place(mask[:, 1:] & ~mask[:, :-1])
        if gap is not None:
            raise InputError(
                f"{path}: attention_mask row {first + gap[0]} is no right-padded prefix: position "
                f"{gap[1]} is 0 and {gap[1] + 1} is 1; right-pad the rows"
            )
        lengths[first : first + step] = mask.sum(1).numpy()
    return lengths


def _first_place(flags: Tensor) -> tuple[int, ...] | None:
    """The index of the first true element, or None."""
    if not bool(flags.any()):
        return None
    flat = int(flags.reshape(-1).to(torch.uint8).argmax())
    return tuple(int(part) for part in np.unravel_index(flat, tuple(flags.shape)))


def first_not_finite(mask: Tensor) -> tuple[int, ...] | None:
    """The index of the first NaN or infinity, or None."""
    if not mask.is_floating_point():
        return None
    if mask.dtype.itemsize == 1:
        mask = mask.float()
    return _first_place(~torch.isfinite(mask))
