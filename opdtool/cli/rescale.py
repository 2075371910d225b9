"""``opdtool rescale``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from opdtool.cli.nearest import did_you_mean
from opdtool.cli.options import ForceOption
from opdtool.core.errors import InputError

KINDS = ("tokens", "sequences", "none")
_MOST = 64 << 20


def command(
    metrics: Annotated[
        str, typer.Argument(metavar="METRICS.json", help="Metrics by name; - reads stdin.")
    ],
    normalizers: Annotated[
        str,
        typer.Option(
            "--normalizers",
            metavar="FILE",
            help="tokens, sequences or none for each metric; - reads stdin.",
        ),
    ],
    token_factor: Annotated[
        float, typer.Option("--token-factor", metavar="X", help="For metrics of tokens.")
    ],
    sequence_factor: Annotated[
        float, typer.Option("--sequence-factor", metavar="Y", help="For metrics of sequences.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write, instead of stdout."),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Multiply each loss metric by the factor of what it was normalized by.

    A metric is a number or a list of numbers. One with no normalizer is left as it is and
    named on stderr.
    """
    from opdtool.cli.emit import say

    if metrics == normalizers == "-":
        raise InputError("rescale: only one of METRICS.json and --normalizers can be stdin (-)")
    for option, factor in (
        ("--token-factor", token_factor),
        ("--sequence-factor", sequence_factor),
    ):
        if not math.isfinite(factor):
            raise InputError(f"{option} is {factor}; give a finite number")
    if output is not None:
        from opdtool.io.writer import check_output

        check_output(output, force=force)
    values = _metrics(metrics)
    kinds = _normalizers(normalizers)
    try:
        made = rescaled(values, kinds, token_factor, sequence_factor)
    except InputError as error:
        raise InputError(f"{'stdin' if metrics == '-' else metrics}: {error}") from None
    text = json.dumps(made, indent=2) + "\n"
    lacking = [name for name in values if name not in kinds]
    if lacking:
        print(f"no normalizer, left as they are: {', '.join(map(ascii, lacking))}", file=sys.stderr)
    if output is None:
        say(text)
        return
    from opdtool.io.writer import write_text_atomic

    write_text_atomic(output, text, force=force)


def rescaled(
    values: dict[str, Any], kinds: dict[str, str], token_factor: float, sequence_factor: float
) -> dict[str, Any]:
    """Every metric times its factor; lists element by element.

    Raises:
        InputError: a product too large for a float.
    """
    from opdtool.core.metrics import rescale_loss_metrics

    factors = {"token_factor": token_factor, "sequence_factor": sequence_factor}
    try:
        # One call for numbers and one for every element of a list: JSON has no arrays to scale.
        found = {
            name: [rescale_loss_metrics({name: item}, kinds, **factors)[name] for item in value]
            if isinstance(value, list)
            else rescale_loss_metrics({name: value}, kinds, **factors)[name]
            for name, value in values.items()
        }
    except OverflowError:
        raise InputError("a metric is too large an integer to be multiplied") from None
    for name, value in found.items():
        if not all(math.isfinite(item) for item in (value if isinstance(value, list) else [value])):
            raise InputError(f"{_short(name)} times its factor is no finite number")
    return found


def _metrics(path: str) -> dict[str, Any]:
    values = _read(path)
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in items):
            raise InputError(
                f"{path}: metric {_short(name)} is {_short(value)}; "
                "expected a number or a list of numbers"
            )
    return values


def _normalizers(path: str) -> dict[str, str]:
    kinds = _read(path)
    for name, kind in kinds.items():
        if not isinstance(kind, str) or kind not in KINDS:
            hint = did_you_mean(kind, KINDS) if isinstance(kind, str) else ""
            raise InputError(
                f"{path}: the normalizer of {_short(name)} is {_short(kind)}; "
                f"expected tokens, sequences or none{hint}"
            )
    return kinds


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read(path: str) -> dict[str, Any]:
    """A JSON object with each key once and finite numbers alone."""
    shown = "stdin" if path == "-" else path
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(_MOST + 1)
        else:
            with open(path, "rb") as file:
                raw = file.read(_MOST + 1)
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except ValueError:  # an embedded NUL
        raise InputError(f"{path!r}: not a path") from None
    if len(raw) > _MOST:
        raise InputError(f"{shown}: larger than {_MOST >> 20} MiB; expected a JSON object")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_int=_integer,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise InputError(f"{shown}: nested too deeply; expected one JSON object") from None
    except ValueError as error:  # also a bad encoding
        raise InputError(f"{shown}: is not JSON as expected: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{shown}: is {_short(value)}; expected a JSON object of names")
    for name, item in value.items():
        numbers = item if isinstance(item, list) else [item]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise InputError(f"{shown}: {_short(name)} is too large for a float")
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _integer(digits: str) -> int:
    # The count first: int() reads no more than 4,300 of them.
    if len(digits) > 400 or abs(int(digits)) > sys.float_info.max:
        raise ValueError(f"an integer of {len(digits):,} digits is too large for a float")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {_short(name)} is there twice")
        found[name] = value
    return found
