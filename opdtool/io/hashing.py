"""sha256 of files and tensors, streaming, and of a command's inputs beside its work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from opdtool.io.background import workers
from opdtool.io.manifest import ManifestInput
from opdtool.io.pread import SourceFile
from opdtool.io.tensors import TensorSource

_STEP = 4 << 20


def sha256_file(path: Path) -> str:
    """The sha256 of a file, in hexadecimal.

    Raises:
        InputError: it cannot be read, or changes meanwhile.
    """
    return _sha256_and_close(SourceFile(path))


def _sha256_and_close(file: SourceFile) -> str:
    try:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_STEP, max(file.size, 1))))
        for at in range(0, file.size, _STEP):
            part = buffer[: min(_STEP, file.size - at)]
            file.read_into(part, at)
            digest.update(part)
        file.check_unchanged()
        return digest.hexdigest()
    finally:
        file.close()


def sha256_tensor(source: TensorSource, name: str) -> str:
    """The sha256 of a tensor's stored bytes (not of its name, dtype or shape)."""
    digest = hashlib.sha256()
    for _, piece in source.chunks(name, _STEP):
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class InputHasher:
    """Hashes inputs in a thread while the command works on them.

        hasher = InputHasher(batch.paths)
        ...
        inputs = hasher.result()

    The files are opened at once, so that what is hashed is what was there, even when another
    file is moved to its name meanwhile.

    Raises:
        InputError: an input that cannot be read, or (from ``result``) that changed meanwhile.
    """

    def __init__(self, paths: Iterable[Path], *, role: str = "batch") -> None:
        self._jobs: list[tuple[str, str, Future[str]]] = []
        for path in paths:
            self.add(path, role=role)

    def add(self, path: Path, *, role: str = "batch") -> None:
        """One more input."""
        job = workers().submit(_sha256_and_close, SourceFile(path))
        self._jobs.append((path.name, role, job))

    def result(self) -> list[ManifestInput]:
        """Every input's name and hash, in the order given. Waits for the thread."""
        return [ManifestInput(name, job.result(), role) for name, role, job in self._jobs]

    def close(self) -> None:
        """Give up what has not begun."""
        for _, _, job in self._jobs:
            job.cancel()


def hash_inputs(paths: Sequence[Path], role: str = "batch") -> list[ManifestInput]:
    """Every file's name and sha256, in the order given."""
    return [ManifestInput(path.name, sha256_file(path), role) for path in paths]
