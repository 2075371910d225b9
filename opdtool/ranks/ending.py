"""How a run in several processes ends: with one status, on every rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from opdtool.core.errors import InputError

if TYPE_CHECKING:
    from opdtool.ranks.driver import Driver

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""What torchrun sets for every process that it starts."""


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return all(name in os.environ for name in TORCHRUN)


def exit_status(error: BaseException | None) -> int:
    """The status that the command will exit with after this exception."""
    if error is None:
        return 0
    code = getattr(error, "exit_code", None)  # typer's Exit and its usage errors
    if isinstance(code, int):
        return code
    if isinstance(error, InputError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 2
    return 3


def leave(status: int) -> NoReturn:
    """End this process with this status, whatever the libraries would do at exit.

    A gloo process that has run a backward pass may abort in its destructors.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def refuse_sigterm() -> None:
    """From here on the end is near: torchrun, seeing one rank end, asks the others to."""
    if under_torchrun():
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def driven(driver: Driver) -> Iterator[None]:
    """The body's exit status becomes every rank's."""
    try:
        yield
    except BaseException as error:
        refuse_sigterm()
        driver.end(exit_status(error))
        raise
    refuse_sigterm()
    driver.end(0)
