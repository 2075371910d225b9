"""What is closed at the end of a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Open files. ``with source:`` closes them at the end, whatever happens."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Close the files. What was read stays good."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
