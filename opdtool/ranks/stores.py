"""The key-value store of torch.distributed, through which ranks in processes find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that opdtool uses."""

    def set(self, key: str, value: str | bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


if TYPE_CHECKING:

    class HostedStore(Store, Protocol):
        """A store that this process hosts, at ``port``."""

        port: int


def host_store() -> HostedStore:
    """A store hosted by this process on a free port of this machine."""
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    return cast("HostedStore", store)


def connect_store(host: str, port: int, timeout: float) -> Store:
    """A connection to a store. A store answers one caller at a time on each connection, so
    what may wait long (forming groups) has a connection of its own."""
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    return cast("Store", store)


def under(prefix: str, store: Store) -> Store:
    """The same store, all keys under a prefix."""
    store_type: Any = torch.distributed.PrefixStore  # type: ignore[attr-defined]
    prefixed = store_type(prefix, store)
    return cast("Store", prefixed)
