"""``opdtool compare``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opdtool.cli.options import (
    DeviceOption,
    ExitZeroOption,
    Format,
    FormatOption,
    MaxMemoryOption,
    QuietOption,
    ReportOption,
    parse_size,
)
from opdtool.core.limits import check_tolerances
from opdtool.findings import Finding, Report, Status

if TYPE_CHECKING:
    import torch

    from opdtool.io.tensors import TensorSource

CHUNK = 8 << 20
"""Bytes of one side that are read at a time, at most."""
PER_ELEMENT = 64
"""Bytes that comparing takes for an element beside itself on both sides, where all differ."""


def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="What is expected; a file or directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it.")],
    rtol: Annotated[
        float, typer.Option("--rtol", help="Allow |b - a| up to this times |a|.")
    ] = 0.0,
    atol: Annotated[float, typer.Option("--atol", help="Allow |b - a| up to this.")] = 0.0,
    device: DeviceOption = "cpu",
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare two files tensor by tensor. NaN equals nothing; a tensor that one side lacks fails.

    Without --rtol and --atol values must be equal; with both, |b - a| <= atol + rtol * |a|.
    """
    from opdtool.cli.emit import Output, emit

    output = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    done = run(a, b, rtol=rtol, atol=atol, device=device, max_memory=parse_size(max_memory))
    emit(done, output)


@dataclass(slots=True)
class _Comparison:
    rtol: float
    atol: float
    device: torch.device
    max_memory: int
    findings: list[Finding] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    names: int = 0

    def say(self, code: str, status: Status, message: str, tensor: str | None = None) -> None:
        from opdtool.checks.registry import check_name

        name = check_name(code)
        self.findings.append(
            Finding(code=code, name=name, status=status, message=message, tensor=tensor)
        )


def run(
    a: Path,
    b: Path,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    device: str = "cpu",
    max_memory: int = 1 << 30,
) -> Report:
    """Compare every tensor of both sides, streaming; returns the report."""
    from opdtool.jobs.device import resolve_device
    from opdtool.jobs.progress import progress

    check_tolerances(rtol=rtol, atol=atol)
    found = _Comparison(rtol, atol, resolve_device(device), max_memory)
    with ExitStack() as stack:
        pairs = list(_pairs(a, b, found, stack))
        common = [
            (label + name, left, right, name)
            for label, left, right in pairs
            for name in _common(label, left, right, found)
        ]
        alike = [entry for entry in common if _alike(*entry, found)]
        total = sum(2 * left.info(name).nbytes for _, left, _, name in alike)
        advance = stack.enter_context(progress("comparing", total, of_bytes=True))
        _pass_unless_failed(found, len(common))
        for label, left, right, name in alike:
            _values(label, left, right, name, found, advance)
    return Report(
        command="compare",
        geometry={"tensors": found.names, "rtol": rtol, "atol": atol},
        findings=tuple(found.findings),
        stats={"tensors": found.stats},
        inputs=(str(a), str(b)),
    )


def _pairs(
    a: Path, b: Path, found: _Comparison, stack: ExitStack
) -> Iterator[tuple[str, TensorSource, TensorSource]]:
    """What is compared with what: two files, two checkpoints, or file by file two
    directories, since packs of several microbatches have the same names in every file."""
    from opdtool.io.tensors import open_tensors

    def opened(path: Path) -> TensorSource:
        return stack.enter_context(open_tensors([path]))

    if not (a.is_dir() and b.is_dir()) or any(
        (path / "model.safetensors.index.json").exists() for path in (a, b)
    ):
        yield "", opened(a), opened(b)
        return
    left, right = ({path.name: path for path in d.glob("*.safetensors")} for d in (a, b))
    for name in sorted(left.keys() | right.keys()):
        if name in left and name in right:
            label = f"{name}: " if len(left) > 1 or len(right) > 1 else ""
            yield label, opened(left[name]), opened(right[name])
        else:
            has, lacks = (a, b) if name in left else (b, a)
            found.say("OPD950", "fail", f"the file {name} is in {has} but not in {lacks}")


def _common(label: str, left: TensorSource, right: TensorSource, found: _Comparison) -> list[str]:
    """The names on both sides; a failure for each that one side lacks."""
    a, b = set(left.names()), set(right.names())
    found.names += len(a | b)
    for name in sorted(a ^ b):
        has, lacks = ("A", "B") if name in a else ("B", "A")
        found.say("OPD950", "fail", f"is in {has} but not in {lacks}", label + name)
    return sorted(a & b)


def _alike(
    label: str, left: TensorSource, right: TensorSource, name: str, found: _Comparison
) -> bool:
    """Whether shape and dtype agree, so that values can be compared; failures if not."""
    a, b = left.info(name), right.info(name)
    if a.shape != b.shape:
        message = f"has shape {list(a.shape)} in A and {list(b.shape)} in B"
        found.say("OPD951", "fail", message, label)
    if a.dtype != b.dtype:
        found.say("OPD952", "fail", f"has dtype {a.dtype} in A and {b.dtype} in B", label)
    return a.shape == b.shape and a.dtype == b.dtype


def _pass_unless_failed(found: _Comparison, common: int) -> None:
    from opdtool.core.words import plural

    failed = {finding.code for finding in found.findings}
    if "OPD950" not in failed and found.names:
        found.say(
            "OPD950", "pass", f"both sides hold the same {plural(found.names, 'tensor', ',')}"
        )
    for code, what in (("OPD951", "shapes"), ("OPD952", "dtypes")):
        if code not in failed and common:
            found.say(code, "pass", f"the {what} of {plural(common, 'tensor', ',')} agree")
    found.findings.sort(key=lambda finding: finding.code)


def _values(
    label: str,
    left: TensorSource,
    right: TensorSource,
    name: str,
    found: _Comparison,
    advance: Any,
) -> None:
    from opdtool.checks.compare import Difference

    info = left.info(name)
    difference = Difference(info.shape, found.rtol, found.atol)
    room = found.max_memory // (PER_ELEMENT + 2 * info.itemsize)
    step = max(1, min(CHUNK // max(1, info.itemsize), room))
    for start in range(0, info.numel, step):
        stop = min(start + step, info.numel)
        pieces = (source.read_flat(name, start, stop) for source in (left, right))
        difference.add(start, *(piece.to(found.device) for piece in pieces))
        advance(2 * (stop - start) * info.itemsize)
    found.findings.append(difference.finding(label))
    found.stats[label] = difference.stats()
