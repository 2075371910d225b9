"""``opdtool explain``."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from opdtool.cli.nearest import did_you_mean, short
from opdtool.core.errors import InputError

if TYPE_CHECKING:
    from opdtool.checks.registry import CheckInfo, FaultInfo


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE_OR_FAULT",
            help="A code such as OPD301, a check's name, or a fault's; without it, the table.",
        ),
    ] = None,
) -> None:
    """Say what a check or a fault means, its usual cause, and how to mend it."""
    from opdtool.cli.emit import say

    rows = _table() if name is None else _explanation(name)
    if sys.stdout.isatty():
        rows = _folded(rows, shutil.get_terminal_size().columns)
    say("".join(row + "\n" for row in rows))


def _folded(rows: Iterable[str], width: int) -> Iterator[str]:
    """The rows folded between words; what goes on below is indented as the text above it."""
    for row in rows:
        at = re.match(r"(\s*\S+\s+\S+\s{2,}|.{14}\s|\s*)", row)
        indent = " " * min(len(at[0]) if at else 0, width // 2)
        if len(row) <= width:
            yield row
        else:
            yield from textwrap.wrap(
                row, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )


def _explanation(name: str) -> Iterator[str]:
    from opdtool.checks.registry import checks, faults

    wanted = name.strip()
    for info in checks().values():
        if wanted.upper() == info.code or wanted.lower() == info.name:
            yield from _check(info)
            return
    if wanted.lower() in faults():
        yield from _fault(faults()[wanted.lower()])
        return
    names = [*checks(), *(info.name for info in checks().values()), *faults()]
    hint = did_you_mean(wanted, names)
    raise InputError(
        f"explain: there is no check or fault named {short(wanted)}{hint}"
        f"{'' if hint else '; see the table with: opdtool explain'}"
    )


def _check(info: CheckInfo) -> Iterator[str]:
    yield f"{info.code} {info.name}"
    yield ""
    yield from _parts(info.statement, info.why, info.cause, info.fix)


def _fault(info: FaultInfo) -> Iterator[str]:
    yield f"{info.name} (a known fault)"
    yield ""
    yield from _parts(info.statement, info.why, info.cause, info.fix)
    yield ""
    yield f"Looked for by  {', '.join(info.commands)}"


def _parts(statement: str, why: str, cause: str, fix: str) -> Iterator[str]:
    titles = ("What", "Why it matters", "Usual cause", "Fix")
    for title, text in zip(titles, (statement, why, cause, fix), strict=True):
        first, *rest = text.split("\n")
        yield f"{title:<14} {first if rest else as_sentence(first)}"
        for row in rest:
            yield " " * 15 + row


def as_sentence(text: str) -> str:
    """The text with a capital and a full stop, unless it begins with a name from code."""
    first = text.split(" ", 1)[0]
    if first.isalpha() and first.islower():
        text = text[0].upper() + text[1:]
    return text if text[-1:] in ".!?:)" else text + "."


def _table() -> Iterator[str]:
    from opdtool.checks.registry import checks, faults

    names = [info.name for info in checks().values()] + list(faults())
    wide = max(map(len, names))
    yield "Checks"
    for check in checks().values():
        yield f"  {check.code}  {check.name:<{wide}}  {as_sentence(check.statement)}"
    yield ""
    yield "Known faults"
    for fault in faults().values():
        yield f"          {fault.name:<{wide}}  {as_sentence(fault.statement)}"
