"""What ranks in different processes tell each other: small messages on a torch.distributed store.

The driver (rank 0's process under torchrun, the parent of spawned ranks) posts tasks and the
final status; every rank posts a greeting, a heartbeat and its outcomes. Every call returns at
once: nothing here waits inside the store, so a lost rank cannot block a healthy one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from opdtool.ranks.errors import RankError
from opdtool.ranks.stores import Store

BEAT_SECONDS = 0.5
"""How often a rank says that it lives."""
HEART = "opdtool-heart"
"""The name of the thread that does."""

_PIECE = 4 << 20  # the store refuses values above 8 MiB

Kind = Literal["ok", "input", "internal", "collective"]


class Outcome(NamedTuple):
    """How one rank's work ended. ``value`` is its result, or the error's text."""

    kind: Kind
    value: Any
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Greeting:
    """Where a rank's process is, and whether it has a GPU of its own."""

    host: str
    pid: int
    started: str
    own_gpu: bool

    @classmethod
    def mine(cls, own_gpu: bool) -> Greeting:
        """The greeting of this process."""
        pid = os.getpid()
        return cls(host=_host(), pid=pid, started=_process_state(pid)[1], own_gpu=own_gpu)

    def gone(self) -> bool:
        """True when that process is known to have ended; False when it lives, or is on
        another machine and cannot be asked."""
        if self.host != _host() or not Path("/proc/self/stat").exists():
            return False
        state, started = _process_state(self.pid)
        return state in ("", "Z", "X") or started != self.started


def _host() -> str:
    """One machine and one process namespace: process ids mean the same within it."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass
    return "/".join(parts)


def _process_state(pid: int) -> tuple[str, str]:
    """(state letter, start time) of a process; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class Board:
    """Messages by key on a store, pickled and signed.

    The store's port is open to the machine's other users, and reading a pickle runs what it
    says: ``secret`` is known to the ranks of this run alone. (Under torchrun there is none to
    share, and torch's own object collectives trust the network likewise.)
    """

    def __init__(self, store: Store, secret: bytes = b"") -> None:
        self._store = store
        self._secret = secret

    def post(self, key: str, value: Any) -> None:
        """Put a message up."""
        data = pickle.dumps(value)
        pieces = range(0, len(data), _PIECE)
        for i, start in enumerate(pieces):
            self._store.set(f"{key}/{i}", data[start : start + _PIECE])
        # The head comes last: a reader that sees it finds every piece.
        self._store.set(key, f"{len(pieces)} {self._sign(key, data)}")

    def read(self, key: str) -> Any:
        """The message under a key, or None when there is none yet."""
        if not self._store.check([key]):
            return None
        count, signature = self._store.get(key).decode().split()
        data = b"".join(self._store.get(f"{key}/{i}") for i in range(int(count)))
        if not hmac.compare_digest(signature, self._sign(key, data)):
            raise RankError(f"{key} on the ranks' store was not written by this run")
        return pickle.loads(data)

    def take(self, key: str) -> Any:
        """As :meth:`read`, and takes the message down."""
        value = self.read(key)
        if value is not None:
            for i in range(int(self._store.get(key).split()[0])):
                self._store.delete_key(f"{key}/{i}")
            self._store.delete_key(key)
        return value

    def _sign(self, key: str, data: bytes) -> str:
        return hmac.new(self._secret, key.encode() + b"\0" + data, hashlib.sha256).hexdigest()

    def count(self, key: str, step: int = 1) -> int:
        """Add to a counter and return it; a step of 0 only asks."""
        return int(self._store.add(key, step))


class Heart:
    """A thread that counts up ``beat/RANK`` on the board for as long as the process lives, and
    ``at_work`` says that it does not merely live."""

    def __init__(self, board: Board, name: str, at_work: Callable[[], bool] = lambda: True) -> None:
        self._board, self._key, self._at_work = board, f"beat/{name}", at_work
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name=HEART).start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                if self._at_work():
                    self._board.count(self._key)
            except Exception:  # the store has gone; whoever polls it says so
                return

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()
