"""sha256 of files and tensors, streaming, and of a command's inputs beside its work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from opdtool.io.manifest import ManifestInput
from opdtool.io.pread import SourceFile
from opdtool.io.tensors import TensorSource

_STEP = 4 << 20


def sha256_file(path: Path) -> str:
    """The sha256 of a file, in hexadecimal.

    Raises:
        InputError: it cannot be read, or changes meanwhile.
    """
    file = SourceFile(path)
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

    Raises:
        InputError: from ``result``: an input that cannot be read, or changed meanwhile.
    """

    def __init__(self, paths: Iterable[Path], *, role: str = "batch") -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="opdtool-inputs")
        self._jobs: list[tuple[str, str, Future[str]]] = []
        for path in paths:
            self.add(path, role=role)

    def add(self, path: Path, *, role: str = "batch") -> None:
        """One more input."""
        self._jobs.append((path.name, role, self._pool.submit(sha256_file, path)))

    def result(self) -> list[ManifestInput]:
        """Every input's name and hash, in the order given. Waits for the thread."""
        try:
            return [ManifestInput(name, job.result(), role) for name, role, job in self._jobs]
        finally:
            self.close()

    def close(self) -> None:
        """Give up what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def hash_inputs(paths: Sequence[Path], role: str = "batch") -> list[ManifestInput]:
    """Every file's name and sha256, in the order given."""
    return [ManifestInput(path.name, sha256_file(path), role) for path in paths]
