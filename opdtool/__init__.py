"""opdtool: prepare and verify the data of on-policy distillation and draft-model training.

Public names are imported on first use (PEP 562), so that ``import opdtool`` does not import
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "MetricNormalizer": "opdtool.core.metrics",
    "PackGeometry": "opdtool.core.layout",
    "PackedLayout": "opdtool.core.layout",
    "cp_window": "opdtool.core.layout",
    "dump": "opdtool.io.dump",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'opdtool' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
