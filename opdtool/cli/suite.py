"""A suite file: which commands to run with which arguments.

    continue_on_failure = true
    [defaults]
    batch = "batch.safetensors"
    [matrix]
    cp = [1, 2]
    [[step]]
    name = "mask"
    command = "verify-mask"
    inputs = ["dumps/mask-cp{cp}*.safetensors"]

A matrix runs each step for every combination of its values: a value is the option of that
name, where the step's command has one, and replaces ``{name}`` in the step's texts. A step
that uses none of them runs once.
"""

from __future__ import annotations

import glob
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdtool.cli.defaults import read_toml
from opdtool.cli.nearest import did_you_mean, short
from opdtool.cli.shapes import Shape, options, split_index
from opdtool.cli.start import COMMANDS
from opdtool.core.errors import InputError
from opdtool.core.words import plural

TOP = ("step", "defaults", "matrix", "continue_on_failure")
OF_A_STEP = ("name", "command", "inputs", "continue_on_failure")
MOST_STEPS = 10_000
"""A matrix that multiplies out to more is a slip."""
NOT_IN_A_SUITE = ("check", "demo")
NOT_OF_A_STEP = ("format", "report", "quiet", "q")
"""Options that say where a report goes: a suite has one report, asked for on its own line."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command line to be run in the suite's folder."""

    name: str
    command: str
    argv: tuple[str, ...]
    continue_on_failure: bool


def read_suite(path: Path) -> list[Step]:
    """Every step of a suite, a matrix multiplied out, in the order of the file.

    Globs are not expanded yet: a step may read what an earlier one wrote.

    Raises:
        InputError: a key or a command that is none (it suggests the nearest), a value of the
            wrong kind, or no steps at all.
    """
    table = read_toml(path)
    where = str(path)
    _known(where, table, TOP)
    steps = table.get("step", [])
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise InputError(f"{where}: step is not a list of tables; write [[step]]")
    if not steps:
        raise InputError(f"{where}: has no [[step]]; nothing was checked")
    defaults = _table(where, table, "defaults")
    matrix = _matrix(where, _table(where, table, "matrix"))
    go_on = _flag(where, table, "continue_on_failure", False)
    names = [_text(f"{where}: step {n}", step, "command") for n, step in enumerate(steps, start=1)]
    for number, name in enumerate(names, start=1):
        _check_command(f"{where}: step {number}", name)
    for kind, keys in (("defaults", defaults), ("matrix", matrix)):
        for key in keys:
            _check_shared(f"{where}: {kind}", key, names, steps, kind)
    return [
        made
        for number, step in enumerate(steps, start=1)
        for made in _steps(f"{where}: step {number}", step, number, defaults, matrix, go_on)
    ]


def shown_name(text: str) -> str:
    """A key or a name as it is, or quoted where it cannot be shown so."""
    return text if text.isprintable() and len(text) <= 60 else short(text)


def _known(where: str, table: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in table:
        if key not in keys:
            hint = did_you_mean(key, keys)
            raise InputError(f"{where}: there is no key {short(key)}{hint}")


def _table(where: str, table: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key} is not a table; write [{key}]")
    return value


def _flag(where: str, table: Mapping[str, Any], key: str, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{where}: {shown_name(key)} is {short(value)}; expected true or false")
    return value


def _text(where: str, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        shown = "missing" if value is None else short(value)
        raise InputError(f"{where}: {key} is {shown}; expected a text")
    return value


def _matrix(where: str, table: Mapping[str, Any]) -> dict[str, list[Any]]:
    for key, values in table.items():
        if not isinstance(values, list) or not values:
            raise InputError(
                f"{where}: matrix.{shown_name(key)} is {short(values)}; expected a list of values"
            )
    return dict(table)


def _check_command(where: str, name: str) -> None:
    if name in NOT_IN_A_SUITE:
        raise InputError(f"{where}: {name} cannot be a step of a suite")
    if name not in COMMANDS:
        raise InputError(
            f"{where}: there is no command {short(name)}{did_you_mean(name, COMMANDS)}"
        )


def _check_shared(
    where: str, key: str, names: Sequence[str], steps: Sequence[Mapping[str, Any]], kind: str
) -> None:
    """Refuse a default or a matrix key that no step can use."""
    if key in NOT_OF_A_STEP:
        raise InputError(f"{where}.{key}: give --{key} to opdtool check itself")
    if any(key in options(name) for name in names):
        return
    if kind == "matrix" and any(f"{{{key}}}" in text for step in steps for text in _texts(step)):
        return
    known = {shape.key for name in names for shape in options(name).values()}
    hint = did_you_mean(key, sorted(known))
    raise InputError(f"{where}: no step's command has an option {short(key)}{hint}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _steps(
    where: str,
    step: Mapping[str, Any],
    number: int,
    defaults: Mapping[str, Any],
    matrix: Mapping[str, list[Any]],
    go_on: bool,
) -> Iterator[Step]:
    """One step of the file: itself, or one for each combination that it uses."""
    command = step["command"]
    shapes = options(command)
    own = {key: value for key, value in step.items() if key not in OF_A_STEP}
    for key in own:
        if key in NOT_OF_A_STEP and key in shapes:
            raise InputError(f"{where}: {key}: give --{key} to opdtool check itself")
        if key not in shapes and key not in {shape.off for shape in shapes.values()}:
            known = [*OF_A_STEP, *(s.key for s in shapes.values() if s.key not in NOT_OF_A_STEP)]
            hint = did_you_mean(key, known)
            raise InputError(f"{where}: {command} has no option {short(key)}{hint}")
    shared = {
        key: value
        for key, value in defaults.items()
        if key in shapes and key not in own and key not in OF_A_STEP
    }
    values = shared | own
    used = [
        key
        for key in matrix
        if (key in shapes and key not in own)
        or any(f"{{{key}}}" in text for text in _texts(dict(step) | shared))
    ]
    name = _text(where, step, "name") if "name" in step else f"{number} {command}"
    going_on = _flag(where, step, "continue_on_failure", go_on)
    count = math.prod(len(matrix[key]) for key in used)
    if count > MOST_STEPS:
        raise InputError(
            f"{where}: the matrix makes {plural(count, 'step', ',')} of it; at most {MOST_STEPS:,} "
            "are run"
        )
    for combination in itertools.product(*(matrix[key] for key in used)):
        chosen = dict(zip(used, combination, strict=True))
        given = values | {k: v for k, v in chosen.items() if k in shapes and k not in own}
        argv = [
            *(part for key, value in given.items() for part in _option(where, shapes, key, value)),
            *_inputs(where, step),
        ]
        shown = ", ".join(f"{key} {value}" for key, value in chosen.items())
        called = _filled(name, chosen)
        full_name = f"{name} ({shown})" if shown and called == name else called
        if not full_name.isprintable():
            raise InputError(f"{where}: the name {short(full_name)} cannot be shown; write another")
        yield Step(
            name=full_name,
            command=command,
            argv=tuple(_filled(part, chosen) for part in argv),
            continue_on_failure=going_on,
        )


def _filled(text: str, chosen: Mapping[str, Any]) -> str:
    for key, value in chosen.items():
        text = text.replace(f"{{{key}}}", str(value))
    return text


def _inputs(where: str, step: Mapping[str, Any]) -> list[str]:
    inputs = step.get("inputs", [])
    if not isinstance(inputs, list) or not all(isinstance(item, str) for item in inputs):
        raise InputError(f"{where}: inputs is {short(inputs)}; expected a list of texts")
    return ["--", *inputs]


def _option(where: str, shapes: Mapping[str, Shape], key: str, value: Any) -> list[str]:
    """One key as it would be typed."""
    shape = shapes.get(key)
    dashes = "-" if len(key) == 1 else "--"
    if shape is None or shape.flag:
        if not isinstance(value, bool):
            raise InputError(
                f"{where}: {shown_name(key)} is {short(value)}; expected true or false"
            )
        if value:
            return [dashes + key]
        return [f"--{shape.off}"] if shape is not None and shape.off else []
    if isinstance(value, dict):
        items = [f"{name}={item}" for name, item in value.items()]
    else:
        items = [str(item) for item in (value if isinstance(value, list) else [value])]
    plain = value.values() if isinstance(value, dict) else value
    for item in plain if isinstance(value, list | dict) else [value]:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise InputError(
                f"{where}: {shown_name(key)} is {short(value)}; expected a text or a number"
            )
    if not shape.multiple:
        items = [",".join(items)]
    return [part for item in items for part in (f"{dashes}{key}", item)]


def expand(step: Step, folder: Path) -> list[str]:
    """The step's command line with its globs expanded, sorted, relative to ``folder``.

    Raises:
        InputError: a pattern that matches nothing, or several files where one is taken.
    """
    shapes = options(step.command)
    line, rest = list(step.argv), []
    found: list[str] = [step.command]
    while (word := line.pop(0)) != "--":  # which may also be an option's value
        shape = shapes.get(word.lstrip("-"))
        if shape is None or shape.flag:
            found.append(word)
            continue
        value = line.pop(0)
        matches = _matches(value, folder) if shape.path else [value]
        if len(matches) > 1 and not shape.multiple:
            raise InputError(f"{word} {value} matches {plural(len(matches), 'file')}; it takes one")
        found += [part for match in matches for part in (word, match)]
    for item in line:
        rest += _matches(item, folder)
    return [*found, "--", *rest]


def _matches(pattern: str, folder: Path) -> list[str]:
    index, pattern = split_index(pattern)
    if not re.search(r"[*?\[]", pattern) or (folder / pattern).exists():
        return [index + pattern]
    found = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
    matches = [index + match for match in found]
    if not matches:
        raise InputError(f"{pattern} matches no file in {folder}; nothing was checked")
    return matches
