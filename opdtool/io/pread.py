"""Reading bytes of a file at a place, and noticing when the file changes underneath.

No memory map: a mapped file that is truncated while it is read kills the process with
SIGBUS, and a mapped file counts against no memory limit that a user could see.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from opdtool.core.errors import InputError

_STEP = 1 << 30
"""Linux moves at most 2 GiB - 4096 bytes a call; this is the most asked for at once."""


def describe(error: OSError) -> str:
    """The operating system's own words for an error, in lower case."""
    return (error.strerror or error.__class__.__name__).lower()


class SourceFile:
    """A regular file open for positional reads.

    Reads may come from several threads. Every read ends with a look at the file's size and
    time of change: a file that is written to while it is read is refused, not believed.

    Raises:
        InputError: there is no such file, it is not a regular file, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            # O_NONBLOCK: opening a named pipe would otherwise wait for a writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; check the path") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be opened: {describe(error)}") from None
        except ValueError:  # an embedded NUL
            raise InputError(f"{str(path)!r}: not a path") from None
        self._fd = fd
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            self.close()
            kind = "a directory" if stat.S_ISDIR(state.st_mode) else "not a regular file"
            raise InputError(f"{path}: {kind}; a file on disk is expected")
        self.size = state.st_size
        self._stamp = (state.st_size, state.st_mtime_ns)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` (flat, bytes) with the file's bytes from ``offset`` on."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        done, wanted = 0, view.nbytes
        while done < wanted:
            try:
                count = os.preadv(self._fd, [view[done : done + _STEP]], offset + done)
            except OSError as error:
                raise InputError(f"{self.path}: cannot be read: {describe(error)}") from None
            if count == 0:
                raise InputError(
                    f"{self.path}: ends at byte {offset + done} of {self.size}: it was truncated "
                    "while being read; wait until it is complete and run again"
                )
            done += count

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``. The caller has checked both against ``size``."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def check_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened."""
        state = os.fstat(self._fd)
        if (state.st_size, state.st_mtime_ns) != self._stamp:
            raise InputError(
                f"{self.path}: changed while being read; wait until it is complete and run again"
            )

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
