"""Outputs that are complete or absent: built beside their name, locked, renamed in.

For an output NAME three hidden siblings may exist while a run works:

    .NAME.lock              held by flock for as long as one run writes NAME
    .NAME.tmp-PID-RANDOM    what is being built
    .NAME.old-PID-RANDOM    what was there before, under --force, until the new one is in

Whoever holds the lock owns the siblings: those that lie there when it is taken are of a
run that was killed, and are removed (or, where the old one is all there is, put back).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from opdtool.core.errors import InputError
from opdtool.io.places import PICKLES
from opdtool.io.pread import describe

OTHER_FORMATS = PICKLES | {".npy", ".npz"}
"""Endings under which nothing that is written here could be read again."""

_TOO_LARGE = "the file would be larger than the system allows"
_ENDING = (signal.SIGTERM, signal.SIGINT)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says of a failed write into a sentence about ``path``."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        hints = {
            errno.ENOSPC: "the disk is full; free some space or write elsewhere",
            errno.EDQUOT: "the disk quota is used up; free some space or write elsewhere",
            errno.EFBIG: _TOO_LARGE,
            errno.EROFS: "the file system is read-only; write elsewhere",
            errno.EACCES: "permission denied; write elsewhere",
            errno.EPERM: "permission denied; write elsewhere",
            errno.ENAMETOOLONG: "the name is too long",
            errno.ENOTDIR: "a part of the path is a file, not a directory",
        }
        reason = hints.get(error.errno or 0, describe(error))
        raise InputError(f"{path}: cannot be written: {reason}") from None
    except OverflowError:  # more bytes than an offset can count
        raise InputError(f"{path}: cannot be written: {_TOO_LARGE}") from None
    except ValueError as error:  # an embedded NUL
        if isinstance(error, InputError) or "null" not in str(error):
            raise
        raise InputError(f"{str(path)!r}: not a path") from None


def check_output(
    path: Path, *, force: bool, directory: bool = False, inputs: Iterable[Path] = ()
) -> None:
    """Refuse an output that is in the way, before any work is done.

    An empty directory is no obstacle to a directory output. A symbolic link is replaced
    under ``force``, never followed. A directory is not replaced when it holds one of the
    ``inputs``, the working directory or the user's home.

    Raises:
        InputError: it exists and ``force`` is not given; it is of the other kind; its name
            says another format; or more than an output would be lost.
    """
    if not directory and path.suffix.lower() in OTHER_FORMATS:
        raise InputError(
            f"{path}: {path.suffix} is another format, and what is written here is not; name it "
            ".safetensors (or .json, for metrics)"
        )
    with writing(path):
        try:
            state = os.lstat(path)
        except FileNotFoundError:
            return
    if stat.S_ISDIR(state.st_mode):
        if not directory:
            raise InputError(f"{path}: is a directory; name a file in it, such as {path}/out")
        with writing(path):
            if os.path.ismount(path):
                raise InputError(f"{path}: is a mount point; name a directory inside it")
            if not os.listdir(path):
                return
    elif not stat.S_ISLNK(state.st_mode):
        if directory:
            raise InputError(f"{path}: is a file; a directory is to be written there")
        if not stat.S_ISREG(state.st_mode):
            raise InputError(f"{path}: is not a regular file; name another output")
    if not force:
        raise InputError(f"{path}: exists; pass --force to replace it, or name another output")
    if directory and not stat.S_ISLNK(state.st_mode):
        _refuse_loss(path, inputs)


def _refuse_loss(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse to replace a directory that holds what nobody meant to delete."""
    root = os.path.realpath(path)
    for precious in (os.getcwd(), os.path.expanduser("~")):
        if os.path.commonpath([root, os.path.realpath(precious)]) == root:
            raise InputError(f"{path}: {precious} would be deleted; name a directory inside it")
    for given in inputs:
        if os.path.commonpath([root, os.path.realpath(given)]) == root:
            raise InputError(
                f"{path}: holds the input {given}; --force would delete it; name another output"
            )


class NameLock:
    """The right to write under one name, from :meth:`take` to :meth:`release`."""

    def __init__(self, path: Path, shown: Path) -> None:
        self._shown = shown
        self._path = path.with_name(f".{path.name}.lock")
        self._handle = -1

    @property
    def held(self) -> bool:
        """Whether it is: a file system may have no locks."""
        return self._handle >= 0

    def take(self) -> None:
        """Take the lock.

        Raises:
            InputError: another run holds it.
        """
        with undisturbed():
            self._take()

    def _take(self) -> None:
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(self._path, flags, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(handle)
                if error.errno in _NO_LOCKS:
                    # A file system without locks: the final rename still lets one run win.
                    self._path.unlink(missing_ok=True)
                    return
                if error.errno == errno.EWOULDBLOCK:
                    raise InputError(
                        f"{self._shown}: another run is writing it now; wait for that one to end, "
                        "or name another output"
                    ) from None
                raise
            # The one before may have removed the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if _same(handle, self._path):
                    self._handle = handle
                    return
            os.close(handle)

    def release(self) -> None:
        """Let the next run have the name."""
        with undisturbed():
            handle, self._handle = self._handle, -1
            if handle >= 0:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
                os.close(handle)


class Target:
    """The right to write one output, and the names to build it under.

    Holds the lock from construction to :meth:`release`. Parent directories are made.

    Raises:
        InputError: the output exists (without ``force``), another run is writing it, or its
            directory cannot be written.
    """

    def __init__(self, path: Path | str, *, force: bool, directory: bool) -> None:
        self.path = Path(os.path.abspath(path))
        self.shown = Path(path)
        self.force = force
        self.directory = directory
        check_output(self.shown, force=force, directory=directory)
        if not self.path.name:
            raise InputError(f"{path}: not a name to write to")
        token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.temporary = self._sibling(f"tmp-{token}")
        self._aside = self._sibling(f"old-{token}")
        self._owner = os.getpid()
        self._lock = NameLock(self.path, self.shown)
        try:
            with writing(self.shown):
                os.makedirs(self.path.parent, exist_ok=True)
                self._lock.take()
                if self._lock.held:
                    self._sweep()
            check_output(self.shown, force=force, directory=directory)
        except BaseException:
            self.release()
            raise

    def _sibling(self, suffix: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{suffix}")

    def _sweep(self) -> None:
        """Remove what killed runs left; put back an old output that nothing replaced."""
        prefix = f".{self.path.name}."
        for name in os.listdir(self.path.parent):
            if not name.startswith((prefix + "tmp-", prefix + "old-")):
                continue
            left = self.path.with_name(name)
            if name.startswith(prefix + "old-") and not os.path.lexists(self.path):
                os.rename(left, self.path)
            else:
                remove(left)

    def move_in(self) -> None:
        """Give what was built at ``temporary`` its final name, in one step.

        Under ``force`` the old one is moved aside first and deleted last.
        """
        with writing(self.shown):
            if self.directory:
                self._move_directory_in()
            elif self.force:
                os.replace(self.temporary, self.path)
            else:
                self._link_in()
            sync_directory(self.path.parent)

    def _move_directory_in(self) -> None:
        aside = self.force and os.path.lexists(self.path)
        if aside:
            check_output(self.shown, force=True, directory=True)
            os.rename(self.path, self._aside)
        try:
            os.rename(self.temporary, self.path)
        except OSError as error:
            if aside:
                os.rename(self._aside, self.path)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise self._appeared() from None
            raise
        if aside:
            remove(self._aside)

    def _link_in(self) -> None:
        """Rename without replacing: a link fails where the name is taken."""
        try:
            os.link(self.temporary, self.path, follow_symlinks=False)
        except FileExistsError:
            raise self._appeared() from None
        except OSError:
            if os.path.lexists(self.path):
                raise self._appeared() from None
            os.rename(self.temporary, self.path)  # a file system without hard links
            return
        os.unlink(self.temporary)

    def _appeared(self) -> InputError:
        return InputError(
            f"{self.shown}: appeared while this run was at work and is kept; "
            "pass --force to replace it, or name another output"
        )

    def release(self) -> None:
        """Remove what was not moved in, and let the next run have the name."""
        with undisturbed():
            try:
                with contextlib.suppress(OSError):
                    remove(self.temporary)
            finally:
                self._lock.release()

    def __del__(self) -> None:
        # A signal may come when this is made and before anybody holds it in a `with`.
        lock = getattr(self, "_lock", None)
        if lock is not None and lock.held and self._owner == os.getpid():
            self.release()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that end a run wait: a lock is taken or given back whole, or not at all.

    A mask holds back the signals of one thread alone, and another thread may take them; but
    handlers of Python run in the main thread, so there they are put aside as well.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    arrived: list[int] = []
    try:
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in _ENDING:
                    handler = signal.getsignal(number)
                    if handler is None or handler == signal.SIG_IGN:
                        continue  # not Python's, or never delivered
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, _: arrived.append(number))
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])  # pending until the mask is lifted
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _same(handle: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(handle), os.lstat(path))


def remove(path: Path) -> None:
    """Remove a file, a link or a directory tree, if it is there. Links are not followed."""
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(state.st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text_atomic(path: Path | str, text: str, *, force: bool) -> None:
    """Write a text file (UTF-8) that is complete or absent, with the user's umask.

    Raises:
        InputError: it exists and ``force`` is not given, or it cannot be written.
    """
    target = Target(path, force=force, directory=False)
    try:
        with writing(target.shown):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(target.temporary, flags, 0o666)
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        target.move_in()
    finally:
        target.release()
