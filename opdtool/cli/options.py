"""The options that several commands share, so that each is spelt and explained once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from opdtool.core.errors import InputError


class Format(StrEnum):
    """What a report looks like on stdout."""

    FULL = "full"
    CONCISE = "concise"
    JSON = "json"
    JSONL = "jsonl"
    JUNIT = "junit"
    GITHUB = "github"
    MARKDOWN = "markdown"


class Algorithm(StrEnum):
    """Bin-packing algorithms."""

    CONCAT = "concat"
    FFD = "ffd"
    FFS = "ffs"
    MFFD = "mffd"
    BFD = "bfd"


class Fp8(StrEnum):
    """fp8 recipes, by the multiple each wants."""

    NONE = "none"
    TENSORWISE = "tensorwise"
    MXFP8 = "mxfp8"
    BLOCKWISE = "blockwise"


class Tail(StrEnum):
    """Where a pack's tail padding goes."""

    ABSORB = "absorb"
    SEGMENT = "segment"


class Ranks(StrEnum):
    """How the TP x CP ranks are run."""

    SIMULATED = "simulated"
    SPAWN = "spawn"


_REPORT = "Report"
_GEOMETRY = "Geometry"
_RUN = "Run"

FormatOption = Annotated[
    Format, typer.Option("--format", help="Report format on stdout.", rich_help_panel=_REPORT)
]
ReportOption = Annotated[
    list[Path],
    typer.Option(
        "--report",
        help="Also write the report here; .json, .xml, .md, .html or .svg. Repeatable.",
        rich_help_panel=_REPORT,
    ),
]
ExitZeroOption = Annotated[
    bool,
    typer.Option("--exit-zero", help="Exit 0 when a check failed.", rich_help_panel=_REPORT),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        help="Print failures alone, if any; json, jsonl, junit and markdown stay whole.",
        rich_help_panel=_REPORT,
    ),
]
RenameOption = Annotated[
    list[str],
    typer.Option(
        "--rename",
        metavar="CANONICAL=THEIRS",
        help="Read the tensor THEIRS as CANONICAL. Repeatable.",
    ),
]
RowAlignedOption = Annotated[
    list[str],
    typer.Option(
        "--row-aligned", metavar="NAME", help="NAME has one entry a row, not one a token."
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_RUN
    ),
]
MaxMemoryOption = Annotated[
    str,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Memory for tensors, such as 512MiB or 2GiB; the rest takes 64MiB more.",
        rich_help_panel=_RUN,
    ),
]
RanksOption = Annotated[
    Ranks, typer.Option("--ranks", help="How ranks are run.", rich_help_panel=_RUN)
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", help="Seconds to wait for a rank.", rich_help_panel=_RUN),
]
CpOption = Annotated[
    int | None,
    typer.Option("--cp", min=1, help="Context-parallel size.", rich_help_panel=_GEOMETRY),
]
TpOption = Annotated[
    int | None,
    typer.Option("--tp", min=1, help="Tensor-parallel size.", rich_help_panel=_GEOMETRY),
]
SequenceParallelOption = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="Pad sequences for sequence parallelism too.",
        rich_help_panel=_GEOMETRY,
    ),
]
PadMultipleOption = Annotated[
    int | None,
    typer.Option(
        "--pad-multiple",
        min=1,
        help="Pad every sequence to a multiple of this.",
        rich_help_panel=_GEOMETRY,
    ),
]
Fp8Option = Annotated[
    Fp8 | None,
    typer.Option(
        "--fp8",
        help="fp8 recipe; each rank's total becomes a multiple of 16, 32 or 128.",
        rich_help_panel=_GEOMETRY,
    ),
]
PadPackedMultipleOption = Annotated[
    int | None,
    typer.Option(
        "--pad-packed-multiple",
        min=1,
        help="Pad each rank's total to a multiple of this.",
        rich_help_panel=_GEOMETRY,
    ),
]
PadPackedToOption = Annotated[
    int | None,
    typer.Option(
        "--pad-packed-to",
        min=1,
        help="Pad every pack to this total, over all ranks.",
        rich_help_panel=_GEOMETRY,
    ),
]
TailOption = Annotated[
    Tail | None,
    typer.Option(
        "--tail",
        help="Tail padding joins the last segment, or becomes one of its own.",
        rich_help_panel=_GEOMETRY,
    ),
]

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {unit + "b": size for unit, size in _UNITS.items() if unit in "kmgt" and unit}
_UNITS |= {unit + "ib": 1024**power for power, unit in enumerate("kmgt", start=1)}


def parse_size(text: str, option: str = "--max-memory") -> int:
    """Bytes in a size such as ``512MiB``, ``2GiB`` or ``1000000``.

    Raises:
        InputError: no size, or zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size < 2**63:
        raise InputError(
            f"{option} {text[:40]!r} is no size; write 512MiB, 2GiB or a number of bytes"
        )
    return int(size)


def parse_renames(pairs: Sequence[str]) -> Mapping[str, str]:
    """``--rename CANONICAL=THEIRS`` pairs as a mapping.

    Raises:
        InputError: a pair without ``=``, an empty side, or a canonical name given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        canonical, equals, theirs = pair.partition("=")
        if not (equals and canonical and theirs):
            raise InputError(f"--rename {pair!r} is no CANONICAL=THEIRS pair")
        if found.setdefault(canonical, theirs) != theirs:
            raise InputError(f"--rename names {canonical} twice: {found[canonical]} and {theirs}")
    return found
