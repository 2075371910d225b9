"""What all renderers share: safe text, numbers as people read them, places, the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from opdtool.core.words import plural
from opdtool.findings import Diagnosis, Finding, Report, Scalar

WORDS = {"pass": "passed", "fail": "failed", "warn": "warned", "skip": "skipped"}


def clean(text: str, *, keep: str = "") -> str:
    r"""The text with every character that does not print written as an escape.

    Tensor names and paths come from files that anyone made: no control code of theirs may
    reach a terminal or break a document. Characters in ``keep`` stay: ``keep="\n"`` for text
    of several lines.

        "a\x1b[31mb" -> "a\\x1b[31mb"
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


_COMMAND = re.compile(r"(?m)^((?:\s|\x1b\[[0-9;]*m)*):(?=:)|#(?=#\[)")


def inert(text: str) -> str:
    r"""The text with no line that a runner of pipelines would read as a command.

    Names come from files that anyone made, and GitHub's runner obeys ``::`` at the beginning
    of a line and ``##[`` anywhere.

        "  ::error::x" -> "  \x3a:error::x"
    """
    return _COMMAND.sub(lambda found: r"\x23" if found[1] is None else found[1] + r"\x3a", text)


def one_line(text: str) -> str:
    """The text on one line: breaks become spaces, other unprintable characters escapes."""
    return clean(" ".join(text.split("\n")) if "\n" in text else text)


def sentence(text: str) -> str:
    """The text on one line, with a full stop where it has no end of its own."""
    line = one_line(text).rstrip()
    return line if not line or line[-1] in ".!?:;" else line + "."


def lines(text: str) -> list[str]:
    """The text's lines, each safe to print."""
    return clean(text, keep="\n").split("\n")


def value(item: Any) -> str:
    """One value as people read it; a float keeps what tells two float32 apart.

    1 -> 1    1.0 -> 1.0    0.1 -> 0.1    True -> true    None -> -    1234567 -> 1234567
    """
    if item is None:
        return "-"
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, float):
        text = f"{item:.9g}"
        return text if any(c in text for c in ".einf") or math.isnan(item) else text + ".0"
    return one_line(str(item))


def count(number: int) -> str:
    """A count with thousands marked: 4096 -> 4,096."""
    return f"{number:,}"


def wrong_of(finding: Finding) -> str:
    """``12 / 4,096`` for a finding that counted, else nothing."""
    if finding.mismatches is None:
        return ""
    if finding.total is None:
        return count(finding.mismatches)
    return f"{count(finding.mismatches)} / {count(finding.total)}"


def columns(places: Sequence[Mapping[str, Scalar]]) -> list[str]:
    """The keys of all places, in the order in which they first appear."""
    return list(dict.fromkeys(key for place in places for key in place))


def place_text(place: Mapping[str, Scalar]) -> str:
    """One place on one line: ``sequence 3, position 17, expected 1.0, actual 0.0``."""
    return ", ".join(f"{one_line(key)} {value(item)}" for key, item in place.items())


def more_places(finding: Finding) -> int:
    """How many mismatches are counted but not shown, where some are."""
    if not finding.first:
        return 0
    return max(0, (finding.mismatches or 0) - len(finding.first))


def geometry_text(report: Report) -> str:
    """``tp 1, cp 2, sequences 8``."""
    return ", ".join(f"{one_line(key)} {value(item)}" for key, item in report.geometry.items())


def fault_names(diagnosis: Diagnosis) -> str:
    """The fault, or both where two were made at once."""
    return " + ".join(diagnosis.faults or (diagnosis.fault,))


def match_text(diagnosis: Diagnosis) -> str:
    """``exact``, or ``likely, 99.4 %``."""
    if diagnosis.score is None:
        return diagnosis.match
    return f"{diagnosis.match}, {100 * diagnosis.score:.1f} %"


def label(finding: Finding) -> str:
    """Code, name and tensor of a finding, with its step in a suite."""
    parts = [finding.code, finding.name]
    if finding.tensor is not None:
        parts.append(one_line(finding.tensor))
    text = " ".join(parts)
    return f"{one_line(finding.step)}: {text}" if finding.step else text


def verdict(report: Report) -> str:
    """The last line of a report: every check is in one of its counts, and the worst come first.

    ``FAILED verify-mask: 1 check failed, 4 passed, 1 warned``
    """
    name, counts = one_line(report.command), report.summary
    if not report.findings:
        return f"DONE {name}"
    word = "PASSED" if report.passed else "FAILED"
    if report.nothing_checked:
        word = "NOTHING CHECKED"
    order = [w for w in ("failed", "passed", "warned", "skipped") if counts[w]]
    first, *rest = order
    head = f"{word} {name}: {plural(counts[first], 'check', ',')} {first}"
    return ", ".join([head, *(f"{count(counts[w])} {w}" for w in rest)])


def outcome(report: Report) -> str:
    """One of ``pass``, ``fail``, ``warn`` and ``skip`` for the report as a whole."""
    if not report.passed:
        return "fail"
    if report.findings and report.nothing_checked:
        return "skip"
    return "warn" if report.summary["warned"] else "pass"


def number(item: float, unit: str = "") -> str:
    """A bar's value with its unit: ``93.1 %``, ``4096``, ``0.0125``."""
    text = f"{item:,.0f}" if float(item).is_integer() and abs(item) < 1e15 else f"{item:.4g}"
    return f"{text} {unit}".strip()


def share(item: float, limit: float) -> float:
    """A bar's length in [0, 1]; what is no number is drawn as empty."""
    if not (math.isfinite(item) and math.isfinite(limit)) or limit <= 0:
        return 0.0
    return min(1.0, max(0.0, item / limit))
