"""The registry of checks and known faults: what each is called, what it means, how to mend it.

No torch here: ``opdtool explain`` and the documentation read this module. The texts live in
``opdtool/checks/texts/``, one module a subject; each holds two tuples, ``CHECKS`` and
``FAULTS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module

SUBJECTS = (
    "layout",
    "content",
    "masks",
    "vocab",
    "teacher",
    "metrics",
    "ranks",
    "files",
    "tools",
)
"""Hundreds of the codes: 1xx layout, 2xx content, 3xx masks, 4xx vocab, ... 9xx files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInfo:
    """One check: ``statement`` is what must hold, ``why`` what breaks in training if it does
    not, ``cause`` the usual line of code, ``fix`` the mend."""

    code: str
    name: str
    statement: str
    why: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInfo:
    """One known fault: ``statement`` says what the code did, ``why`` what it does to training,
    ``cause`` shows the usual line of code, ``fix`` the mend. ``commands`` look for it."""

    name: str
    statement: str
    why: str
    cause: str
    fix: str
    commands: tuple[str, ...]


@cache
def checks() -> dict[str, CheckInfo]:
    """Every check by code, in order of code."""
    found = [
        info
        for subject in SUBJECTS
        for info in import_module(f"opdtool.checks.texts.{subject}").CHECKS
    ]
    return {info.code: info for info in sorted(found, key=lambda info: info.code)}


@cache
def faults() -> dict[str, FaultInfo]:
    """Every known fault by name, in the order in which they are tried and listed."""
    found = [
        info
        for subject in SUBJECTS
        for info in import_module(f"opdtool.checks.texts.{subject}").FAULTS
    ]
    return {info.name: info for info in found}


def check_name(code: str) -> str:
    """The name of a check, such as ``mask-values`` for ``OPD301``."""
    return checks()[code].name
