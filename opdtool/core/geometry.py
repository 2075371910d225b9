"""PackGeometry: from the lengths of sequences and the options of a pack to its layout.

Legend: N segments, T packed slots of the whole pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

import numpy as np

from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.limits import check_ranks, check_slots
from opdtool.core.offsets import CuSeqlens, Ints, as_offsets, cumulative

Tail = Literal["absorb", "segment"]

FP8_MULTIPLES = {"none": 1, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Slots per rank that each fp8 recipe wants a pack's total to be a multiple of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackGeometry:
    """How sequences are padded and cut; the options of ``opdtool pack`` (contract 5.1).

    ``pad_packed_multiple`` is per rank and joins ``fp8`` by least common multiple;
    ``pad_packed_to`` is the pack's total, over all ranks.

    Raises:
        InputError: a size below 1 or that no pack can have, or a multiple that the geometry
            does not divide.
    """

    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    pad_multiple: int | None = None
    fp8: str = "none"
    pad_packed_multiple: int = 1
    pad_packed_to: int | None = None
    tail: Tail = "absorb"

    def __post_init__(self) -> None:
        for name in ("cp_size", "tp_size", "pad_multiple", "pad_packed_multiple", "pad_packed_to"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        check_ranks(self.tp_size, self.cp_size)
        if self.fp8 not in FP8_MULTIPLES:
            raise InputError(f"fp8 is {self.fp8!r}; it is one of {', '.join(FP8_MULTIPLES)}")
        if self.tail not in ("absorb", "segment"):
            raise InputError(f"tail is {self.tail!r}; it is absorb or segment")
        check_slots("each sequence is padded to", self.sequence_multiple)
        check_slots("a pack's total is padded to", self.total_multiple)
        check_slots("pad-packed-to is", self.pad_packed_to or 1)
        if self.pad_multiple is not None and self.pad_multiple % self.base_multiple:
            raise InputError(
                f"pad multiple {self.pad_multiple} is not a multiple of {self.base_multiple}, "
                f"which {self._why()} need; take a multiple of {self.base_multiple}"
            )
        if self.pad_packed_to is not None:
            need = self.total_multiple
            if self.pad_packed_to % need:
                raise InputError(
                    f"pad-packed-to {self.pad_packed_to} is not a multiple of {need}, "
                    f"which {self._why()} need; take a multiple of {need}"
                )

    def _why(self) -> str:
        parallel = "on" if self.sequence_parallel else "off"
        return f"CP {self.cp_size}, TP {self.tp_size} and sequence parallelism {parallel}"

    @property
    def _cp_factor(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def _tp_factor(self) -> int:
        return self.tp_size if self.sequence_parallel else 1

    @property
    def base_multiple(self) -> int:
        """What every padded length must be a multiple of: (2 CP) x (TP with SP)."""
        return self._cp_factor * self._tp_factor

    @property
    def sequence_multiple(self) -> int:
        """What every sequence is padded to a multiple of."""
        return self.pad_multiple if self.pad_multiple is not None else self.base_multiple

    @property
    def total_multiple(self) -> int:
        """What the pack's total is padded to a multiple of."""
        return lcm(FP8_MULTIPLES[self.fp8], self.pad_packed_multiple) * self.base_multiple

    def padded(self, lengths: Ints) -> Ints:
        """Each length rounded up to the sequence multiple, int64 [N]."""
        multiple = self.sequence_multiple
        return -(-lengths // multiple) * multiple

    def padded_total(self, total: int) -> int:
        """A pack's total after its tail padding.

        Raises:
            InputError: ``pad_packed_to`` is smaller than ``total``.
        """
        if self.pad_packed_to is not None:
            if total > self.pad_packed_to:
                raise InputError(
                    f"a pack has {total} padded slots, more than pad-packed-to "
                    f"{self.pad_packed_to}; raise it, or split the batch with --max-tokens"
                )
            return self.pad_packed_to
        return -(-total // self.total_multiple) * self.total_multiple

    def layout(
        self, lengths: CuSeqlens, *, sequence_index: CuSeqlens | None = None
    ) -> PackedLayout:
        """The pack of sequences with these real lengths [N], in this order.

        Raises:
            InputError: a negative length, or ``pad_packed_to`` is too small.
        """
        real = as_offsets(lengths, "lengths")
        if len(real) and real.min() < 0:
            raise InputError(f"length {int(np.argmin(real))} is {real.min()}, below 0")
        physical = self.padded(real)
        tail = self.padded_total(int(physical.sum())) - int(physical.sum())
        index = (
            np.arange(len(real), dtype=np.int64)
            if sequence_index is None
            else as_offsets(sequence_index, "sequence_index")
        )
        if tail and self.tail == "absorb" and len(real):
            physical[-1] += tail
        elif tail:
            real, physical = np.append(real, 0), np.append(physical, tail)
        return PackedLayout(
            cu_seqlens=cumulative(real),
            cu_seqlens_padded=cumulative(physical),
            cp_size=self.cp_size,
            sequence_index=index,
        )
