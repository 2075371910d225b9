"""How a run in several processes ends: with one status, on every rank."""

from __future__ import annotations

import atexit
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
        driver.end(exit_status(error))
        raise
    driver.end(0)


_waiting: list[Driver] = []
"""The driver whose ranks wait for this process's exit status, under torchrun."""


def waiting_driver() -> Driver | None:
    """The driver of ranks that torchrun started, once it has been made."""
    return _waiting[0] if _waiting else None


def settle_later(driver: Driver) -> None:
    """Keep a driver until the exit status is known; should nobody say, it is 0."""
    _waiting.append(driver)
    atexit.register(driver.end, 0)


def settle(status: int) -> None:
    """End the ranks that torchrun started with the command's final status, and this process
    too; returns where there are none."""
    driver = waiting_driver()
    if driver is None:
        return
    refuse_sigterm()
    driver.end(status)
    leave(status)
