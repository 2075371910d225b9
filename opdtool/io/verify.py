"""Does a directory hold what its manifest says?"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.hashing import sha256_file
from opdtool.io.manifest import NAME, Manifest, ManifestFile
from opdtool.io.tensors import open_tensors

ProblemKind = Literal["missing", "size", "sha256", "tensors", "unlisted"]


@dataclass(frozen=True, slots=True)
class FileProblem:
    """One way in which a file differs from its manifest. ``message`` is a whole sentence."""

    file: str
    kind: ProblemKind
    message: str


def verify_files(directory: Path, manifest: Manifest, *, hashes: bool = True) -> list[FileProblem]:
    """Every difference between a directory and its manifest, by file; none when all holds.

    Sizes first, then hashes (unless ``hashes`` is False), then the tensors' names, dtypes
    and shapes. A ``.safetensors`` file that the manifest does not list is a problem too.
    """
    found = [
        problem
        for file in manifest.files
        if (problem := _problem(directory / file.name, file, hashes)) is not None
    ]
    listed = {file.name for file in manifest.files} | {NAME}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors") and name not in listed and not name.startswith("."):
            found.append(FileProblem(name, "unlisted", f"{name} is not in the manifest"))
    return found


def _problem(path: Path, file: ManifestFile, hashes: bool) -> FileProblem | None:
    name = file.name
    try:
        state = os.lstat(path)
    except OSError:
        return FileProblem(name, "missing", f"{name} is in the manifest but not in the directory")
    if not stat.S_ISREG(state.st_mode):
        return FileProblem(name, "missing", f"{name} is not a regular file")
    if state.st_size != file.size:
        return FileProblem(
            name,
            "size",
            f"{name} has {plural(state.st_size, 'byte')}; the manifest says {file.size}",
        )
    if hashes:
        digest = sha256_file(path)
        if digest != file.sha256:
            return FileProblem(
                name,
                "sha256",
                f"{name} has sha256 {digest[:16]}...; the manifest says {file.sha256[:16]}...",
            )
    try:
        with open_tensors([path]) as source:
            infos = [source.info(key) for key in source.names()]
    except InputError as error:
        return FileProblem(name, "tensors", str(error))
    tensors = {info.name: (info.dtype, info.shape) for info in infos}
    if tensors != dict(file.tensors):
        differ = sorted(
            key
            for key in tensors.keys() | file.tensors.keys()
            if tensors.get(key) != file.tensors.get(key)
        )
        return FileProblem(
            name, "tensors", f"{name}: {', '.join(differ[:5])} not as the manifest says"
        )
    return None
