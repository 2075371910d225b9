"""Coloured lines: rich only where there is colour to add, plain strings elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "skip": "cyan"}
MARKS = {"pass": "✓", "fail": "✗", "warn": "!", "skip": "-"}


@dataclass(slots=True)
class Line:
    """One line of text in styled runs."""

    runs: list[tuple[str, str]] = field(default_factory=list)

    def add(self, text: str, style: str = "") -> Line:
        """This line with one more run; returns itself, to be chained."""
        self.runs.append((text, style))
        return self

    @property
    def plain(self) -> str:
        """The text alone."""
        return "".join(text for text, _ in self.runs)


def paint(rows: Iterable[Line], *, color: bool) -> str:
    """The lines as one text, with ANSI colours where asked; nothing is folded or cut."""
    if not color:
        return "".join(row.plain.rstrip() + "\n" for row in rows)
    # rich.text and rich.style alone: a Console would measure, fold and crop.
    from rich.color import ColorSystem
    from rich.style import Style

    def run(text: str, style: str) -> str:
        parsed = Style.parse(style) if style else Style.null()
        return parsed.render(text, color_system=ColorSystem.STANDARD)

    return "".join("".join(run(*part) for part in row.runs).rstrip() + "\n" for row in rows)


def cells(text: str) -> int:
    """How many terminal columns the text takes; wide characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pad(text: str, width: int, *, right: bool = False) -> str:
    """The text in a field of so many columns; ``right`` for numbers."""
    space = " " * (width - cells(text))
    return space + text if right else text + space
