"""Checks of many packs, shared out over the ranks of a run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from opdtool.core.errors import InputError

T = TypeVar("T")


def pack_up(value: object, shared: Mapping[str, object]) -> bytes:
    """A value fit to travel to another process that has ``shared`` too.

    What is shared (open files, readers of a batch) stays behind: the value refers to it by
    name.
    """
    names = {id(thing): name for name, thing in shared.items()}
    buffer = BytesIO()
    pickler = _Pickler(buffer)
    pickler.names = names
    pickler.dump(value)
    return buffer.getvalue()


def unpack_with(data: bytes, shared: Mapping[str, object]) -> Any:
    """The value that :func:`pack_up` packed, on this process's own ``shared``."""
    unpickler = _Unpickler(BytesIO(data))
    unpickler.shared = shared
    return unpickler.load()


def interleaved(shares: Sequence[Sequence[T]]) -> list[T]:
    """What was dealt out item by item (``Topology.share_with_all``), in the first order.

    [a d] [b e] [c]  ->  a b c d e
    """
    count = sum(len(share) for share in shares)
    return [shares[i % len(shares)][i // len(shares)] for i in range(count)]


def dump_sizes(dump: Sequence[Path], tp: int | None, cp: int | None) -> tuple[int, int]:
    """(TP, CP) of the ranks that a dump is checked on: the options', else the dump's own.

    A dump that cannot be read is one rank's: the command itself says what is wrong with it.
    """
    from opdtool.jobs.dump_files import group_dump

    try:
        groups = group_dump(dump, cp)
    except (InputError, OSError):
        return tp or 1, cp or 1
    recorded = (groups.recorded or {}).get("tp")
    return tp or (recorded if isinstance(recorded, int) else 1), groups.cp


class _Pickler(pickle.Pickler):
    names: Mapping[int, str]

    def persistent_id(self, obj: object) -> str | None:
        return self.names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    shared: Mapping[str, object]

    def persistent_load(self, pid: str) -> object:
        return self.shared[pid]
