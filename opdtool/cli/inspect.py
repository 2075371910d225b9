"""``opdtool inspect``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
    RenameOption,
    ReportOption,
    parse_renames,
    parse_size,
)
from opdtool.core.errors import InputError
from opdtool.findings import Finding, Report, Table

if TYPE_CHECKING:
    import torch

    from opdtool.checks.inspect import Figures
    from opdtool.io.tensors import TensorInfo, TensorSource

CHUNK = 16 << 20
"""Bytes that are read at a time, at most."""
PER_ELEMENT = 16
"""Bytes that the figures take for an element beside itself: float64 to be summed, and masks."""
COLUMNS = ("tensor", "dtype", "shape", "bytes", "NaN", "Inf", "min", "max", "mean")
NUMERIC = frozenset({"bytes", "NaN", "Inf", "min", "max", "mean"})


def command(
    path: Annotated[Path, typer.Argument(metavar="FILE_OR_DIR", help="What to look at.")],
    rename: RenameOption = [],  # noqa: B006
    device: DeviceOption = "cpu",
    max_memory: MaxMemoryOption = "1GiB",
    format: FormatOption = Format.FULL,
    report: ReportOption = [],  # noqa: B006
    exit_zero: ExitZeroOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show names, shapes, dtypes, bytes and values; check the manifest and canonical names."""
    from opdtool.cli.emit import Output, emit

    output = Output(format=format.value, reports=report, exit_zero=exit_zero, quiet=quiet)
    done = run(path, rename=parse_renames(rename), device=device, max_memory=parse_size(max_memory))
    emit(done, output)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tensors that are looked at together: a file, or a whole checkpoint."""

    label: str
    source: TensorSource


def run(
    path: Path,
    *,
    rename: Mapping[str, str] | None = None,
    device: str = "cpu",
    max_memory: int = 1 << 30,
) -> Report:
    """Look at every tensor once; returns the report."""
    from opdtool.checks.canonical import Stored, check_canonical
    from opdtool.checks.inspect import check_finite
    from opdtool.jobs.device import resolve_device
    from opdtool.jobs.progress import progress

    on = resolve_device(device)
    findings = list(_manifest(path)) if path.is_dir() else []
    sections: list[Table] = []
    stats: dict[str, Any] = {}
    everything: dict[str, Figures] = {}
    unread: dict[str, str] = {}
    with ExitStack() as stack:
        units = _units(path, rename or {}, stack)
        if not any(unit.source.names() for unit in units):
            raise InputError(f"{path}: holds no tensors; nothing was checked")
        total = sum(unit.source.info(n).nbytes for unit in units for n in unit.source.names())
        advance = stack.enter_context(progress("reading", total, of_bytes=True))
        for unit in units:
            infos = [unit.source.info(name) for name in unit.source.names()]
            figures = {
                info.name: _figures(unit.source, info, on, max_memory, advance) for info in infos
            }
            before = f"{unit.label}: " if len(units) > 1 else ""
            stored = [Stored(info.name, info.shape, info.dtype) for info in infos]
            findings += check_canonical(stored, before)
            everything |= {before + info.name: figures[info.name] for info in infos}
            unread |= {before + info.name: info.dtype for info in infos if not info.readable}
            sections.append(_table(unit.label, infos, figures))
            stats[unit.label] = {info.name: _stats(info, figures[info.name]) for info in infos}
        files = len({unit.source.path_of(n) for unit in units for n in unit.source.names()})
    findings += check_finite(everything, unread)
    return Report(
        command="inspect",
        geometry={"files": files, "tensors": len(everything), "bytes": total},
        findings=tuple(findings),
        stats={"files": stats},
        sections=tuple(sections),
        inputs=(str(path),),
    )


def _units(path: Path, rename: Mapping[str, str], stack: ExitStack) -> Sequence[_Unit]:
    """A checkpoint's shards together; other directories file by file, for packs of several
    microbatches have the same names in every file."""
    from opdtool.io.tensors import check_renames, open_tensors

    together = path.is_file() or (path / "model.safetensors.index.json").exists()
    paths = [path] if together or not path.is_dir() else sorted(path.glob("*.safetensors"))
    if not paths:
        raise InputError(f"{path}: holds no .safetensors files; name a file, or another directory")
    units = [
        _Unit(
            path.name or str(path) if together else part.name,
            stack.enter_context(open_tensors([part], rename=rename, strict_rename=False)),
        )
        for part in paths
    ]
    check_renames(rename, *(unit.source for unit in units))
    return units


def _figures(
    source: TensorSource, info: TensorInfo, device: torch.device, max_memory: int, advance: Any
) -> Figures:
    from opdtool.checks.inspect import Figures

    figures = Figures()
    if not info.readable:
        advance(info.nbytes)
        return figures
    size = max(1, info.itemsize)
    room = max(size, max_memory * size // (size + PER_ELEMENT))
    for _, piece in source.chunks(info.name, min(CHUNK, room)):
        figures.add(piece.to(device))
        advance(piece.numel() * piece.element_size())
    return figures


def _manifest(directory: Path) -> Iterator[Finding]:
    """``manifest-files``, where the directory has a manifest."""
    from opdtool.checks.registry import check_name
    from opdtool.io.manifest import NAME, has_manifest, read_manifest
    from opdtool.io.verify import verify_files

    if not has_manifest(directory):
        return
    manifest = read_manifest(directory)
    code, name = "OPD940", check_name("OPD940")
    problems = verify_files(directory, manifest)
    for problem in problems:
        yield Finding(code=code, name=name, status="fail", message=problem.message)
    if not problems:
        message = f"{len(manifest.files):,} files are as {NAME} says"
        yield Finding(code=code, name=name, status="pass", message=message)


def _table(title: str, infos: Sequence[TensorInfo], figures: Mapping[str, Figures]) -> Table:
    rows = []
    for info in infos:
        found = figures[info.name]
        rows.append(
            (
                info.name,
                info.dtype,
                str(list(info.shape)),
                f"{info.nbytes:,}",
                f"{found.nan:,}" if info.readable else "-",
                f"{found.inf:,}" if info.readable else "-",
                *(_number(x) for x in (found.low, found.high, found.mean)),
            )
        )
    return Table(title=title, columns=COLUMNS, rows=tuple(rows), numeric=NUMERIC)


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _stats(info: TensorInfo, figures: Figures) -> dict[str, Any]:
    return {
        "dtype": info.dtype,
        "shape": list(info.shape),
        "bytes": info.nbytes,
        "nan": figures.nan if info.readable else None,
        "inf": figures.inf if info.readable else None,
        "min": figures.low,
        "max": figures.high,
        "mean": figures.mean,
    }
