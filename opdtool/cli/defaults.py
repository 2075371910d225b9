"""Defaults of options: from a file near the working directory, and from the environment.

Flags win over ``OPDTOOL_*`` in the environment, which wins over the file. The file is
``opdtool.toml``, or the table ``[tool.opdtool]`` of ``pyproject.toml``: the nearest above
the working directory. Keys are options; a table named like a command is for it alone.

    format = "concise"
    [verify-mask]
    cp = 2
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from opdtool.cli.nearest import did_you_mean, short
from opdtool.cli.shapes import Shape, is_path, options, relative_to
from opdtool.core.errors import InputError

OWN = "opdtool.toml"
SHARED = "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Config:
    """A file of defaults: where it is and what it says, unchecked."""

    path: Path
    table: Mapping[str, Any]

    @property
    def shown(self) -> str:
        """The path as one would type it here."""
        return os.path.relpath(self.path)


active: ContextVar[Config | None] = ContextVar("config", default=None)
"""The file that the running command takes its defaults from."""


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's table.

    Raises:
        InputError: it cannot be read, or is not TOML; it says where.
    """
    shown = path if not path.is_absolute() else os.path.relpath(path)
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        # Python's advice on longer integers is for programmers.
        words = "an integer has too many digits" if "int_max_str" in str(error) else error
        raise InputError(f"{shown}: is not TOML: {words}") from None


def find_config(start: Path) -> Config | None:
    """The nearest file of defaults in ``start`` or above it."""
    for folder in (start, *start.parents):
        if (folder / OWN).is_file():
            return Config(folder / OWN, read_toml(folder / OWN))
        if (folder / SHARED).is_file():
            config = _shared(folder / SHARED)
            if config is not None:
                return config
    return None


def read_config(path: Path) -> Config:
    """The file that ``--config`` names: a ``pyproject.toml`` or one like ``opdtool.toml``."""
    path = path.absolute()
    if path.name != SHARED:
        return Config(path, read_toml(path))
    return _shared(path) or Config(path, {})


def _shared(path: Path) -> Config | None:
    tool = read_toml(path).get("tool")
    table = tool.get("opdtool") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise InputError(f"{path}: tool.opdtool is not a table")
    return None if table is None else Config(path, table)


def defaults_for(config: Config, command: str, commands: Mapping[str, str]) -> dict[str, Any]:
    """Values by parameter for one command, as if they had been typed.

    Raises:
        InputError: a key that is no option (of that command, or of any), or a value of a
            kind that the option does not take. The whole file is checked, whatever the command.
    """
    found: dict[str, Any] = {}
    for key, value in config.table.items():
        if key in commands:
            continue
        # The running command's own first: options of one name are alike, not always the same.
        shapes = (options(name).get(key) for name in sorted(commands, key=command.__ne__))
        shape = next(filter(None, shapes), None)
        if shape is None:
            known = {shape.key for name in commands for shape in options(name).values()}
            raise _unknown(config, key, known | set(commands))
        checked = _value(config, shape, key, value)
        if key in options(command):
            found[shape.parameter] = checked
    for name in commands:
        table = config.table.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{config.shown}: {name} is a command; write a table [{name}]")
        for key, value in table.items():
            shape = options(name).get(key)
            if shape is None:
                known = {shape.key for shape in options(name).values()}
                raise _unknown(config, f"{name}.{key}", known, key)
            checked = _value(config, shape, f"{name}.{key}", value)
            if name == command:
                found[shape.parameter] = checked
    return found


def _unknown(config: Config, shown: str, known: set[str], key: str | None = None) -> InputError:
    hint = did_you_mean(key or shown, sorted(known))
    return InputError(f"{config.shown}: there is no option {short(shown)}{hint}")


def _value(config: Config, shape: Shape, key: str, value: Any) -> Any:
    """The value as typed on the command line; relative paths are taken from the file."""
    where = f"{config.shown}: {key}"
    if shape.flag:
        if not isinstance(value, bool):
            raise InputError(f"{where} is {short(value)}; expected true or false")
        return value
    # A text may be a list with commas between, as --must-include 1,2 is.
    listed = shape.multiple or (shape.kind is str and not shape.path)
    items = value if isinstance(value, list) and listed else [value]
    if not all(isinstance(item, str | int | float) and type(item) is not bool for item in items):
        kinds = "a text, a number or a list of them" if listed else "a text or a number"
        raise InputError(f"{where} is {short(value)}; expected {kinds}")
    texts = [str(item) for item in items]
    for text in texts:
        _check_kind(where, shape, text)
    if shape.path:
        texts = [relative_to(text, config.path.parent) for text in texts]
    return texts if shape.multiple else ",".join(texts)


def _check_kind(where: str, shape: Shape, text: str) -> None:
    """Refuse here what the option would refuse, so that the message names the file."""
    if issubclass(shape.kind, Enum):
        choices = [str(choice.value) for choice in shape.kind]
        if text not in choices:
            hint = did_you_mean(text, choices)
            raise InputError(
                f"{where} is {short(text)}; expected one of {', '.join(choices)}{hint}"
            )
    elif shape.kind in (int, float):
        try:
            shape.kind(text)
        except ValueError:
            raise InputError(f"{where} is {short(text)}; expected a number") from None


def refuse_empty_paths(command: Any) -> Any:
    """The command refusing an empty text where a path is expected; returns it.

    It would be the working directory: ``verify-pack "$PACKS"`` of a pipeline that did not set
    the variable would check whatever lies there.
    """
    for parameter in command.params:
        if is_path(parameter.type_descriptor.annotation):
            parameter.consume_value = _not_empty(parameter.consume_value)
    return command


def _not_empty(consume: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    def consume_value(ctx: Any, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        value, source = consume(ctx, opts)
        if value == "" or (isinstance(value, list | tuple) and "" in value):
            ctx.fail("an empty path; if it comes from a variable, that one is not set")
        return value, source

    return consume_value


def take_environment(command: Any, name: str) -> Any:
    """The command with every option readable from the environment; returns it.

    ``--max-memory`` of ``pack`` is ``OPDTOOL_PACK_MAX_MEMORY``, else ``OPDTOOL_MAX_MEMORY``.
    """
    for parameter in command.params:
        if parameter.param_type_name != "option" or parameter.name is None:
            continue
        option = parameter.name.upper()
        names = [f"OPDTOOL_{name.upper().replace('-', '_')}_{option}"]
        # OPDTOOL_CONFIG is the file of defaults, never a checkpoint's config.json.
        if option != "CONFIG":
            names.append(f"OPDTOOL_{option}")
        parameter.envvar = names
        parameter.show_envvar = False
    return command
