"""Which safetensors files a path stands for: itself, a directory's, or a checkpoint's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.header import strict_json
from opdtool.io.pread import SourceFile, describe

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
CONFIG = "config.json"
PICKLES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
MAX_JSON = 256 << 20


@dataclass(frozen=True, slots=True)
class Places:
    """The files behind the paths that were ``asked`` for.

    ``index`` maps tensor names to files where a checkpoint's index says so; its shards are
    opened when they are needed, so that one that was not downloaded does not matter until
    then.
    """

    asked: tuple[Path, ...]
    files: tuple[Path, ...]
    index: Mapping[str, Path] | None = None
    index_path: Path | None = None


def find_places(paths: Sequence[Path]) -> Places:
    """The files that ``paths`` stand for, in order.

    Raises:
        InputError: there is nothing at a path, or it holds no safetensors.
    """
    if not paths:
        raise InputError("no input file given")
    if len(paths) == 1 and paths[0].name == INDEX:
        return _checkpoint(paths[0], tuple(paths))
    files: list[Path] = []
    for path in paths:
        if not _is_directory(path):
            refuse_pickle(path)
            files.append(path)
        elif (path / WHOLE).exists() and any((path / name).exists() for name in (INDEX, CONFIG)):
            files.append(path / WHOLE)  # as the loaders of models do, before any index
        elif (path / INDEX).exists():
            if len(paths) == 1:
                return _checkpoint(path / INDEX, tuple(paths))
            files += _checkpoint(path / INDEX, (path,)).files
        else:
            files += _directory(path)
    return Places(tuple(paths), tuple(files))


def refuse_pickle(path: Path) -> None:
    """Refuse a torch pickle, with the command that converts it."""
    if path.suffix.lower() in PICKLES and path.exists():
        raise InputError(
            f"{path}: a pickle is never loaded; convert it: "
            f"opdtool convert {path} -o {path.with_suffix('.safetensors')}"
        )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False  # opening it will say what is wrong


def _directory(path: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be listed: {describe(error)}") from None
    found = [path / name for name in names if name.endswith(".safetensors") and name[0] != "."]
    if not found:
        for name in names:
            refuse_pickle(path / name)
        raise InputError(f"{path}: holds no .safetensors file; check the path")
    return found


def read_json_file(path: Path) -> object:
    """The JSON value of a file, read strictly.

    Raises:
        InputError: it cannot be read or is not JSON.
    """
    file = SourceFile(path)
    try:
        if file.size > MAX_JSON:
            raise InputError(f"{path}: {plural(file.size, 'byte')} of JSON, past {MAX_JSON}")
        return strict_json(file.read(0, file.size), str(path))
    finally:
        file.close()


def _checkpoint(path: Path, asked: tuple[Path, ...]) -> Places:
    """The shards of an index, none outside its directory."""
    raw = read_json_file(path)
    weights = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise InputError(f"{path}: no weight_map of tensor names to files")
    shards: dict[str, Path] = {}
    for name, shard in weights.items():
        if not isinstance(shard, str):
            raise InputError(f"{path}: weight_map[{ascii(name)[:80]}] is not a file name")
        if shard not in shards:
            shards[shard] = inside(path.parent, shard, path)
    return Places(
        asked,
        tuple(dict.fromkeys(shards.values())),
        {name: shards[shard] for name, shard in weights.items()},
        path,
    )


def inside(directory: Path, name: str, said_by: Path) -> Path:
    """``directory / name``, refused when that lies outside the directory.

    A symbolic link is followed only to a file of the same directory, or, as model caches
    store their files, from a snapshot to a blob of the same cache.
    """
    parts = PurePosixPath(name)
    if not name or not name.isprintable() or parts.is_absolute() or ".." in parts.parts:
        raise InputError(f"{said_by}: {ascii(name)[:200]} is not a file of its directory")
    path = directory / parts
    root = directory.resolve()
    real = path.resolve()
    if real.is_relative_to(root):
        return path
    if root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs"):
        return path
    raise InputError(f"{said_by}: {name} is a link out of its directory ({real})")
