"""An ``opdtool`` for the pages' shell that starts at once: each command line runs in a fork of
one process that has imported torch already. It is the same program, with the same
standard streams, folder and environment; only the two seconds of importing torch are saved.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

CLIENT = """#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
request = dict(argv=sys.argv, cwd=os.getcwd(), env=dict(os.environ))
server.sendall(json.dumps(request).encode())
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(16) or 70))
"""


@contextmanager
def quick_opdtool(env: Mapping[str, str]) -> Iterator[Path]:
    """A folder for the front of ``PATH`` with such an ``opdtool``, while the context lasts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        address = str(folder / "socket")
        client = folder / "opdtool"
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        command = [sys.executable, __file__, address]
        with subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            if server.stdout.readline() != b"ready\n":
                raise RuntimeError("the quick opdtool did not start")
            try:
                yield folder
            finally:
                server.terminate()


def serve(address: str) -> NoReturn:
    """Run one command line for each connection, each in a fork of its own."""
    import torch  # noqa: F401

    import opdtool.cli.main  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
        connection.close()


def answer(connection: socket.socket) -> NoReturn:
    """Read one request, run it in a fork, and send its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    request = json.loads(data)
    pid = os.fork()
    if pid == 0:
        connection.close()
        run(request["argv"], request["cwd"], request["env"], streams)
    for stream in streams:
        os.close(stream)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def run(argv: list[str], cwd: str, env: dict[str, str], streams: list[int]) -> NoReturn:
    """The command itself, as the console script would run it."""
    from opdtool.cli.start import main

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    status = 70
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        for written in (sys.stdout, sys.stderr):
            written.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
