"""Which files of a dump are one pack, which rank each is, and reading them a few at a time."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.findings import Scalar

if TYPE_CHECKING:
    from torch import Tensor

    from opdtool.io.tensors import TensorSource

TAG = re.compile(r"\.cp(\d+)of(\d+)(?=\.)")
MOST_OPEN = 96
"""Files held open at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpPack:
    """One pack: its files in rank order. ``tagged`` where their names say their ranks."""

    name: str
    files: tuple[Path, ...]
    tagged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpGroups:
    """All packs of a dump, the context-parallel size, and what a manifest recorded: the
    geometry, and the tensors that go by rows."""

    packs: tuple[DumpPack, ...]
    cp: int
    recorded: Mapping[str, Scalar] | None = None
    row_aligned: tuple[str, ...] = ()


def group_dump(paths: Sequence[Path], cp: int | None) -> DumpGroups:
    """The packs in the files given, one file a context-parallel rank.

    Ranks are read from ``.cpRofN`` in the names, files of one stem being one pack; files
    without it are the ranks of one pack in the order given, or with CP 1 a pack each. A
    directory stands for its files; a manifest in it says the geometry.

    Raises:
        InputError: files that are missing or given twice, or names that contradict each
            other or ``--cp``.
    """
    files, recorded, row_aligned = _files(paths)
    return replace(_grouped(paths, files, cp, recorded), row_aligned=row_aligned)


def _grouped(
    paths: Sequence[Path], files: list[Path], cp: int | None, recorded: Mapping[str, Scalar] | None
) -> DumpGroups:
    if not files:
        raise InputError(f"{paths[0]}: its manifest lists no files; there is nothing to verify")
    if recorded is not None and cp is None and type(recorded.get("cp")) is int:
        cp = int(str(recorded["cp"]))
    tagged = [path for path in files if TAG.search(path.name)]
    if tagged and len(tagged) < len(files):
        other = next(path for path in files if path not in tagged)
        raise InputError(
            f"{other} has no .cpRofN in its name and {tagged[0].name} has; give the ranks' files "
            "or one file of the whole pack, not both"
        )
    if tagged:
        return _by_name(files, cp, recorded)
    size = cp or 1
    if size == 1 or len(files) == 1:
        packs = [DumpPack(name=path.stem, files=(path,), tagged=False) for path in files]
        return DumpGroups(packs=tuple(packs), cp=size, recorded=recorded)
    if len(files) != size:
        raise InputError(
            f"{files[0]} and {len(files) - 1} more: {plural(len(files), 'file')} for --cp {size}; "
            "expected "
            f"{size} of one pack in rank order, or names with .cpRof{size}"
        )
    pack = DumpPack(name=files[0].stem, files=tuple(files), tagged=False)
    return DumpGroups(packs=(pack,), cp=size, recorded=recorded)


def _files(
    paths: Sequence[Path],
) -> tuple[list[Path], Mapping[str, Scalar] | None, tuple[str, ...]]:
    """The files, and the geometry and tensors by rows that manifests record."""
    from opdtool.io.manifest import has_manifest, read_manifest
    from opdtool.io.places import find_places

    files: list[Path] = []
    recorded: Mapping[str, Scalar] | None = None
    by_rows: set[str] = set()
    for path in paths:
        if path.is_dir() and has_manifest(path):
            manifest = read_manifest(path)
            files += [path / file.name for file in manifest.files]
            if recorded is not None and recorded != manifest.geometry:
                raise InputError(
                    f"{path}: its manifest records another geometry than the directory before; "
                    "verify one at a time"
                )
            recorded = manifest.geometry
            by_rows.update(_row_aligned(path, manifest.extra.get("row_aligned", [])))
        else:
            files += find_places([path]).files
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise InputError(f"{file} is given twice; give each file once")
        seen.add(file.resolve())
    return files, recorded, tuple(sorted(by_rows))


def _row_aligned(path: Path, names: object) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{path}/manifest.json: row_aligned is {ascii(names)[:60]}; a list of tensor names is "
            "expected; pack again"
        )
    return names


MOST_DIGITS = 7
"""Digits of a rank in a file's name: more would be counted to, or overflow."""


def _by_name(
    files: Sequence[Path], cp: int | None, recorded: Mapping[str, Scalar] | None
) -> DumpGroups:
    ranks: dict[tuple[Path, str], dict[int, Path]] = {}
    size = cp
    for path in files:
        match = TAG.search(path.name)
        assert match is not None
        if max(len(match[1]), len(match[2])) > MOST_DIGITS:
            raise InputError(
                f"{path}: nobody has as many ranks as its name says; write .cpRofN, as in .cp0of2"
            )
        rank, named = int(match[1]), int(match[2])
        if size is None:
            size = named
        if named != size:
            said = f"--cp {cp}" if cp is not None else f"{files[0].name}"
            raise InputError(
                f"{path} is rank {rank} of {named} by its name, which contradicts {said}; "
                "verify one context-parallel size at a time"
            )
        if rank >= named:
            raise InputError(f"{path}: there is no rank {rank} of {named}; ranks count from 0")
        stem = path.name[: match.start()] + path.name[match.end() :].removesuffix(".safetensors")
        group = ranks.setdefault((path.parent, stem), {})
        if rank in group:
            raise InputError(f"{path} and {group[rank]} are the same rank of the same pack")
        group[rank] = path
    from opdtool.io.fileset import interrupted_set

    assert size is not None
    packs = []
    for (parent, stem), group in ranks.items():
        missing = next((rank for rank in range(size) if rank not in group), None)
        if missing is not None:
            raise InputError(
                f"{parent / stem}: {len(group)} of {size} context-parallel files; the file of "
                f"rank {missing} (.cp{missing}of{size}) is missing"
            )
        if interrupted_set(parent / f"{stem}.safetensors"):
            raise InputError(
                f"{parent / stem}: its files are being replaced, or a run was killed doing so; "
                "wait for that run to end, or run the command that wrote them again"
            )
        ordered = tuple(group[rank] for rank in range(size))
        packs.append(DumpPack(name=stem, files=ordered, tagged=True))
    return DumpGroups(packs=tuple(packs), cp=size, recorded=recorded)


@dataclass(slots=True)
class DumpFiles:
    """The files of a dump, opened when they are read and closed when too many are open."""

    rename: Mapping[str, str]
    used_renames: set[str] = field(default_factory=set)
    _open: OrderedDict[Path, TensorSource] = field(default_factory=OrderedDict)

    def source(self, path: Path) -> TensorSource:
        """The tensors of a file."""
        from opdtool.io.tensors import open_tensors

        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        source = open_tensors([path], rename=self.rename, strict_rename=False)
        self.used_renames |= source.used_renames
        self._open[path] = source
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return source

    def maybe(self, path: Path, name: str) -> Tensor | None:
        """A small tensor of a file, whole, or None."""
        source = self.source(path)
        return source.read(name) if name in source else None

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()
