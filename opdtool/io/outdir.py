"""A directory output: built beside its name, its manifest last, renamed in whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from opdtool.io.atomic import Target, sync_directory, undisturbed, writing
from opdtool.io.writer import TensorFileWriter, TensorSpec, WrittenFile, seal, spec_of

MANIFEST = "manifest.json"


class OutputPart:
    """Files in a directory that is being built, by this or by another process."""

    def __init__(self, work: Path, shown: Path | None = None) -> None:
        self.work = work
        self._shown = shown or work
        self._writers: list[TensorFileWriter] = []
        self._added: list[WrittenFile] = []

    def tensor_file(
        self,
        name: str,
        specs: Iterable[TensorSpec],
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
    ) -> TensorFileWriter:
        """A file of this directory to fill; a context manager.

        A ``shared`` one is filled by several processes, and listed after :meth:`seal`.
        """
        _refuse_path(name)
        writer = TensorFileWriter(
            self._shown / name,
            list(specs),
            metadata=metadata,
            working=self.work / name,
            shared=shared,
        )
        self._writers.append(writer)
        return writer

    def seal(self, name: str, specs: Iterable[TensorSpec], written: int) -> None:
        """List a shared file, once all its writers are done with ``written`` bytes in all."""
        _refuse_path(name)
        self._added.append(seal(self.work / name, list(specs), written))

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> WrittenFile:
        """Write tensors that are in memory to a file of this directory."""
        specs = [spec_of(key, tensor) for key, tensor in tensors.items()]
        with self.tensor_file(name, specs) as writer:
            for key, tensor in tensors.items():
                writer.write(key, tensor)
        return writer.finish()

    def write_text(self, name: str, text: str) -> None:
        """Write a text file (UTF-8) of this directory. Manifests do not list it."""
        _refuse_path(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with writing(self._shown / name):
            handle = os.open(self.work / name, flags, 0o666)
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())

    @property
    def files(self) -> list[WrittenFile]:
        """The finished files, by name."""
        own = [writer.result for writer in self._writers if writer.result is not None]
        return sorted([*own, *self._added], key=lambda file: file.name)

    def records(self) -> list[dict[str, Any]]:
        """The finished files as plain values, for the process that ends the directory."""
        return [file.to_record() for file in self.files]

    def add_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take files that another process wrote into ``work``."""
        self._added += [WrittenFile.from_record(record) for record in records]


class OutputDir(OutputPart):
    """A directory output; a context manager. Leaving it unfinished removes everything.

        with OutputDir("packs", force=False) as out:
            with out.tensor_file("pack-00000.safetensors", specs) as file:
                file.write("input_ids", block)
            out.finish(make_manifest("pack", files=out.files, ...).to_json())

    Raises:
        InputError: it exists (without ``force``), another run is writing it, or it cannot
            be written.
    """

    def __init__(self, path: Path | str, *, force: bool = False) -> None:
        self._target = Target(path, force=force, directory=True)
        self.path = Path(path)
        super().__init__(self._target.temporary, self.path)
        try:
            with writing(self.path):
                os.mkdir(self.work)
        except BaseException:
            self._target.release()
            raise

    def finish(self, manifest: str) -> None:
        """Write ``manifest.json``, make everything durable, and rename the directory in."""
        with writing(self.path):
            for file in self.files:
                _ = file.sha256  # the thread that hashes also syncs
        self.write_text(MANIFEST, manifest)
        sync_directory(self.work)
        self._target.move_in()

    def __enter__(self) -> OutputDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with undisturbed():
            for writer in self._writers:
                writer.abort()
            self._target.release()


def _refuse_path(name: str) -> None:
    if not name or name != os.path.basename(name) or name in (".", ".."):
        raise ValueError(f"{name!r} is no plain file name")
