"""Several files that belong together, all of them under their names or none.

A file is renamed in by itself, so a run can be killed between two files of a set. Before the
first rename a journal is put beside them:

    .NAME.set       the set's files, what each is built as, and whether old ones are replaced

and after the last one it is removed. Whoever finds one, and holds the lock of NAME, makes
things whole: new files are taken out again where the names were free, and the others are
moved in where they replace an older set. NAME is the output as it was named, which is none of
the files: mask.safetensors for mask.cp0of2.safetensors and mask.cp1of2.safetensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from opdtool.core.errors import InputError
from opdtool.io.atomic import (
    NameLock,
    Target,
    check_output,
    remove,
    sync_directory,
    undisturbed,
    write_text_atomic,
    writing,
)
from opdtool.io.writer import TensorFileWriter, TensorSpec

MOST_JOURNAL = 64 << 20
"""Bytes of a journal; one of more is not ours."""


def journal_of(output: Path) -> Path:
    """Where the journal of a set lies, by the name of the output."""
    return output.with_name(f".{output.name}.set")


class FileSet:
    """The files of one output; a context manager. Leaving it unfinished removes everything.

        with FileSet(output, paths, force=False) as out:
            for path in paths:
                with out.tensor_file(path, specs) as file:
                    ...
            out.finish()

    All files lie in the output's directory. What a killed run left is made whole first.

    Raises:
        InputError: a file exists (without ``force``), another run writes one of them, or the
            directory cannot be written.
    """

    def __init__(self, output: Path, paths: Sequence[Path], *, force: bool) -> None:
        recover(output)
        self._journal = Path(os.path.abspath(journal_of(output)))
        self._lock = NameLock(Path(os.path.abspath(output)), output)
        self._targets: dict[Path, Target] = {}
        self._writers: list[TensorFileWriter] = []
        self._force = force
        try:
            for path in paths:
                self._targets[path] = Target(path, force=force, directory=False)
            with writing(output):
                self._lock.take()
        except BaseException:
            self._release()
            raise

    def tensor_file(self, path: Path, specs: Sequence[TensorSpec]) -> TensorFileWriter:
        """One of the files, to fill; a context manager."""
        writer = TensorFileWriter(path, specs, working=self._targets[path].temporary)
        self._writers.append(writer)
        return writer

    def finish(self) -> None:
        """Give all files their names."""
        for writer in self._writers:
            with writing(writer.path):
                _ = writer.finish().sha256  # the thread that hashes also syncs
        with undisturbed():
            write_text_atomic(self._journal, self._as_journal(), force=True)
            try:
                for target in self._targets.values():
                    target.move_in()
            except BaseException:
                _make_whole(self._journal)
                raise
            os.unlink(self._journal)
            sync_directory(self._journal.parent)

    def _as_journal(self) -> str:
        files = []
        for target in self._targets.values():
            files.append(
                {
                    "name": target.path.name,
                    "built": target.temporary.name,
                    "is": _identity(os.lstat(target.temporary)),
                }
            )
        return json.dumps({"replaces": self._force, "files": files}, indent=1) + "\n"

    def _release(self) -> None:
        with undisturbed():
            for writer in self._writers:
                writer.abort()
            for target in self._targets.values():
                target.release()
            self._lock.release()

    def __enter__(self) -> FileSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()


def recover(output: Path) -> None:
    """Make whole what a run left that was killed between two files of this output.

    Raises:
        InputError: another run is at work on it, or the directory cannot be written.
    """
    journal = Path(os.path.abspath(journal_of(output)))
    if not os.path.lexists(journal):
        return
    lock = NameLock(Path(os.path.abspath(output)), output)
    try:
        with writing(output):
            lock.take()
            with undisturbed():
                _make_whole(journal)
    finally:
        lock.release()


def interrupted_set(output: Path) -> bool:
    """Whether the files of an output are being put in place, or a run was killed doing so."""
    return os.path.lexists(journal_of(output))


def _make_whole(journal: Path) -> None:
    """Undo or finish what the journal says, and remove it. Files are told by their inodes, sizes
    and times, so that one which somebody has put there since is left alone."""
    told = _read(journal)
    for entry in told["files"] if told else ():
        built, final = (journal.with_name(entry[key]) for key in ("built", "name"))
        moved_in, left = _is(final, entry["is"]), _is(built, entry["is"])
        if told and told["replaces"]:
            if left:
                with contextlib.suppress(InputError):  # a directory by now
                    check_output(final, force=True)
                    os.replace(built, final)
        elif moved_in:
            os.unlink(final)
        if _is(built, entry["is"]):
            os.unlink(built)
    remove(journal)
    sync_directory(journal.parent)


def _identity(state: os.stat_result) -> list[int]:
    return [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns]


def _is(path: Path, identity: Sequence[int]) -> bool:
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(state.st_mode) and _identity(state) == list(identity)


def _read(journal: Path) -> Mapping[str, Any] | None:
    """What a journal says; None for one that was not written here."""
    try:
        state = os.lstat(journal)
        if not stat.S_ISREG(state.st_mode) or state.st_size > MOST_JOURNAL:
            return None
        told = json.loads(journal.read_bytes())
        plain = [
            entry["name"] == os.path.basename(entry["name"])
            and entry["built"].startswith(f".{entry['name']}.tmp-")
            and entry["built"] == os.path.basename(entry["built"])
            and [type(part) for part in entry["is"]] == [int] * 4
            for entry in told["files"]
        ]
        return told if all(plain) and type(told["replaces"]) is bool else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
