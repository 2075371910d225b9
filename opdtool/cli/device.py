"""``--device`` to a torch device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from opdtool.core.errors import InputError

if TYPE_CHECKING:
    import torch


def resolve_device(text: str) -> torch.device:
    """The device of ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        InputError: another word, or a CUDA device that is not there.
    """
    import torch

    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if text != "cpu" and not re.fullmatch(r"cuda(:\d+)?", text):
        raise InputError(f"--device {text!r} is none; write auto, cpu, cuda or cuda:N")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {text} is not there: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return device
