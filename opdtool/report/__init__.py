"""Reports in every format: one small renderer each, all drawing the same :class:`Report`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from typing import Any, cast

from opdtool.findings import Report
from opdtool.report.text import inert

FORMATS = ("full", "concise", "json", "jsonl", "junit", "github", "markdown")
"""What ``--format`` prints."""

ENDINGS = {".json": "json", ".xml": "junit", ".md": "markdown", ".html": "html", ".svg": "svg"}
"""What ``--report`` writes, by the ending of its path."""

_MODULES = {
    "full": "full",
    "concise": "concise",
    "json": "machine",
    "jsonl": "machine",
    "junit": "junit",
    "github": "github",
    "markdown": "markdown",
    "html": "html",
    "svg": "svg",
}


def render(report: Report, format: str, *, width: int | None = None, color: bool = False) -> str:
    """The report as text in one of :data:`FORMATS` or of the values of :data:`ENDINGS`.

    ``width`` folds long messages of ``full`` to so many columns; None, as off a terminal,
    to 120. Names are never cut at any width. ``color`` colours ``full`` and
    ``concise`` with ANSI codes and means nothing to the others. The text ends in a newline.

    Raises:
        ValueError: ``format`` is none of them.
    """
    if format not in _MODULES:
        raise ValueError(f"format is {format!r}; it is one of {', '.join(_MODULES)}")
    # Imported when asked for: rich alone costs more than all the others together.
    module = import_module(f"opdtool.report.{_MODULES[format]}")
    if format == "full":
        return inert(module.full(report, width=width, color=color))
    if format == "concise":
        return inert(module.concise(report, color=color))
    draw: Callable[[Report], str] = getattr(module, format)
    return inert(draw(report)) if format == "markdown" else draw(report)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every JSON report satisfies."""
    text = files("opdtool.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))


__all__ = ["ENDINGS", "FORMATS", "render", "schema"]
