"""Runs command lines in forks of a process that has imported torch already.

Reads one JSON object a line: ``argv``, and optionally ``after`` (seconds) with ``signal``,
``limits`` (of ``resource``, by name), ``stdout`` (``closed``: a pipe that nobody reads),
``plain`` (root gives up what it may do beyond other users), ``cwd`` and ``dies_before`` (the
number of a call that gives or takes a name, before which the process kills itself; one of
``calls``, where those are given). Answers with one line: exit status, seconds, what was printed.
Forks are cheap, so that a hundred of them can be
killed, and all of it in the command's own work.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any


def drop_capabilities() -> None:
    """Let the permissions of files hold for root too."""
    if os.getuid() == 0:
        version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
        nothing = (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(version_3, nothing) == 0


CALLS = ("link", "rename", "replace", "unlink", "rmdir", "mkdir")
"""What gives a file its name, or takes one away."""


def die_before(number: int, names: Sequence[str] = CALLS) -> None:
    """Kill this process before its call ``number`` (from 0) that gives a file its name or takes
    one away."""
    calls = iter(range(number + 1))

    def mortal(call: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            if next(calls, number) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return made

    for name in names:
        setattr(os, name, mortal(getattr(os, name)))


def child(request: dict[str, Any], out: int, err: int) -> None:
    """The command, in the fork."""
    from opdtool.cli.start import main

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request.get("stdout") == "closed":
        read, out = os.pipe()
        os.close(read)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
    if "cwd" in request:
        os.chdir(request["cwd"])
    for name, value in request.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if request.get("plain"):
        drop_capabilities()
    if "dies_before" in request:
        die_before(request["dies_before"], request.get("calls", CALLS))
    sys.argv = ["opdtool", *request["argv"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait (or send the signal at its time), and tell what happened."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                child(request, out.fileno(), err.fileno())
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
                for stream in (sys.stdout, sys.stderr):
                    try:
                        stream.flush()
                    except OSError:
                        status = 71
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        handle = os.pidfd_open(pid)
        sent = False
        if request.get("after") is not None:
            left = begun + request["after"] - time.monotonic()
            if not select.select([handle], [], [], max(left, 0))[0]:
                os.kill(pid, request["signal"])
                sent = True
        if not select.select([handle], [], [], 120)[0]:
            os.killpg(pid, signal.SIGKILL)
        os.close(handle)
        _, status, usage = os.wait4(pid, 0)
        out.seek(0)
        err.seek(0)
        return {
            "status": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - begun,
            "sent": sent,
            "out": out.read().decode(errors="replace"),
            "err": err.read().decode(errors="replace"),
            "peak": usage.ru_maxrss * 1024,
        }


def serve() -> None:
    """One answer for every line."""
    import torch

    import opdtool

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of a fork that has not begun its command
    for module in pkgutil.walk_packages(opdtool.__path__, "opdtool."):
        if module.name != "opdtool.__main__":
            importlib.import_module(module.name)
    answers = os.dup(1)
    for line in sys.stdin:
        os.write(answers, json.dumps(run(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    serve()
