"""What options a command has, for what configures them from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Shape:
    """One option: its keys in a file (the spellings without dashes, the longest first), its
    parameter, and what values it takes. ``off`` is the key of a flag's opposite; ``kind`` is
    int, float, an enum of choices, or str for all else."""

    keys: tuple[str, ...]
    parameter: str
    flag: bool
    off: str | None
    multiple: bool
    path: bool
    kind: type = str

    @property
    def key(self) -> str:
        """The key that people write."""
        return self.keys[0]


@cache
def options(command: str) -> Mapping[str, Shape]:
    """Every option of a command by every key that means it."""
    from opdtool.cli.main import load

    hints = get_type_hints(_function(command), include_extras=True)
    found: dict[str, Shape] = {}
    for parameter in load(command).params:
        if parameter.param_type_name != "option" or parameter.name not in hints:
            continue
        keys = sorted((text.lstrip("-") for text in parameter.opts), key=len, reverse=True)
        shape = Shape(
            keys=tuple(keys),
            parameter=parameter.name,
            flag=bool(parameter.is_flag),
            off=next((text.lstrip("-") for text in parameter.secondary_opts), None),
            multiple=bool(parameter.multiple),
            path=is_path(hints[parameter.name], parameter.metavar),
            kind=_kind(hints[parameter.name]),
        )
        found |= dict.fromkeys(keys, shape)
    return found


def _function(command: str) -> Any:
    return import_module(f"opdtool.cli.{command.replace('-', '_')}").command


def is_path(hint: Any, metavar: str | None = None) -> bool:
    """Paths, and texts that hold one: ``[INDEX=]PATH[:KEY]``."""
    if re.search(r"PATH|FILE|DIR", metavar or ""):
        return True
    if hint is Path:
        return True
    return get_origin(hint) is not None and any(is_path(part) for part in get_args(hint))


def _kind(hint: Any) -> type:
    """What one value is: the type inside ``Annotated``, ``list`` and ``| None``."""
    if get_origin(hint) is None:
        known = isinstance(hint, type) and (hint in (int, float) or issubclass(hint, Enum))
        return hint if known else str
    kinds = [_kind(part) for part in get_args(hint) if isinstance(part, type) or get_origin(part)]
    return next((kind for kind in kinds if kind is not str), str)


def relative_to(text: str, folder: Path) -> str:
    """A path, or ``INDEX=PATH``, taken from ``folder`` where it is not absolute.

    ``-`` (standard input) stays.
    """
    index, path = split_index(text)
    return text if path == "-" else f"{index}{folder / path}"


def split_index(text: str) -> tuple[str, str]:
    """``INDEX=`` and the rest of ``INDEX=PATH``; the first is empty where there is none."""
    match = re.match(r"\d+=", text)
    return (match[0], text[match.end() :]) if match else ("", text)
