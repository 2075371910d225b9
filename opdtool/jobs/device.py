"""``--device`` to a torch device."""

from __future__ import annotations

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

    from opdtool.ranks.perform import check_device_name

    check_device_name(text)
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {text} is not there: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return device


def describe_torch() -> list[str]:
    """torch's version and the devices it sees, one a line."""
    import torch

    rows = [f"torch {torch.__version__}", f"cpu: {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = found.total_memory / 2**30
        rows.append(f"cuda:{index}: {found.name}, {memory:.0f} GiB")
    if not torch.cuda.is_available():
        rows.append("cuda: none")
    return rows
