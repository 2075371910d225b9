"""Which rows go into which pack: lengths and a geometry in, microbatches and figures out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opdtool.core.binning import pack_bins
from opdtool.core.errors import InputError
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Ints, as_offsets
from opdtool.core.words import plural

_NAMED = 8
"""How many rows a refusal names before it counts the rest."""


class RowsError(InputError):
    """Rows that cannot be packed, by their number in the batch; whoever knows the file adds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BinOptions:
    """How rows are split into microbatches (contract 5.1); without ``max_tokens`` one pack."""

    max_tokens: int | None = None
    algorithm: str = "bfd"
    min_bins: int = 1
    bins_multiple_of: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is None and (self.min_bins > 1 or self.bins_multiple_of > 1):
            raise InputError(
                "--min-bins and --bins-multiple-of split the batch into microbatches; "
                "give their size with --max-tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPlan:
    """The microbatches of a batch: ``order[offsets[m]:offsets[m + 1]]`` are the rows of
    microbatch m, in the order of its segments. ``lengths`` int64 [B] are the batch's."""

    geometry: PackGeometry
    bins: BinOptions
    lengths: Ints
    order: Ints
    offsets: Ints
    dropped: Ints

    @property
    def microbatches(self) -> int:
        """How many packs there are."""
        return len(self.offsets) - 1

    def rows(self, microbatch: int) -> Ints:
        """The batch rows of one pack, in the order of its segments."""
        return self.order[self.offsets[microbatch] : self.offsets[microbatch + 1]]

    def layout(self, microbatch: int) -> PackedLayout:
        """The layout of one pack; its ``sequence_index`` are batch rows."""
        rows = self.rows(microbatch)
        return self.geometry.layout(self.lengths[rows], sequence_index=rows)

    def layouts(self) -> Iterator[PackedLayout]:
        """The layout of every pack."""
        return (self.layout(m) for m in range(self.microbatches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """How full packs are. Real tokens plus alignment padding plus tail are the slots."""

    real_tokens: int
    alignment_padding: int
    tail_padding: int
    microbatches: int
    lower_bound: int
    balance: float
    """Real tokens of the fullest microbatch over their mean; 1.0 is even."""
    loads: tuple[int, ...]
    """Real tokens of each microbatch."""
    totals: tuple[int, ...]
    """Slots of each microbatch."""

    @property
    def slots(self) -> int:
        """Slots over all microbatches."""
        return self.real_tokens + self.alignment_padding + self.tail_padding

    @property
    def utilisation(self) -> float:
        """Real tokens over slots."""
        return self.real_tokens / self.slots if self.slots else 0.0


def plan_packs(
    lengths: Ints, geometry: PackGeometry, bins: BinOptions, *, drop_empty: bool = False
) -> PackPlan:
    """The microbatches of rows with these lengths, int64 [B].

    Raises:
        InputError: a negative length, no rows, rows of length 0 (unless ``drop_empty``), a row
            that does not fit into ``max_tokens``, too few rows for the bins asked for, or a
            total that ``pad_packed_to`` cannot hold.
    """
    lengths = as_offsets(lengths, "lengths")
    below = np.flatnonzero(lengths < 0)
    if len(below):
        raise RowsError(f"{_rows(below)} of length {lengths[below[0]]}: a length is not below 0")
    empty = np.flatnonzero(lengths == 0)
    if len(empty) and not drop_empty:
        raise RowsError(
            f"{_rows(empty)} of length 0 cannot be packed; leave them out with --drop-empty"
        )
    kept = np.flatnonzero(lengths > 0)
    if len(kept) == 0:
        raise RowsError("the batch has no rows with tokens; there is nothing to pack")
    order, offsets = kept, np.array([0, len(kept)], dtype=np.int64)
    if bins.max_tokens is not None:
        order, offsets = _split(lengths, kept, geometry, bins)
    else:
        geometry.padded_total(int(geometry.padded(lengths[kept]).sum()))
    return PackPlan(
        geometry=geometry,
        bins=bins,
        lengths=lengths,
        order=order,
        offsets=offsets,
        dropped=empty,
    )


def bin_capacity(geometry: PackGeometry, max_tokens: int) -> int:
    """Slots that sequences may fill in a pack of at most ``max_tokens`` slots, tail included.

    Raises:
        InputError: ``pad_packed_to`` is larger, or no pack is that small.
    """
    if geometry.pad_packed_to is not None:
        if geometry.pad_packed_to > max_tokens:
            raise InputError(
                f"pad-packed-to {geometry.pad_packed_to} is more than --max-tokens {max_tokens}"
            )
        return geometry.pad_packed_to
    capacity = max_tokens // geometry.total_multiple * geometry.total_multiple
    if capacity < 1:
        raise InputError(
            f"--max-tokens {max_tokens} is less than {geometry.total_multiple}, the smallest "
            "total of this geometry"
        )
    return capacity


def _split(
    lengths: Ints, kept: Ints, geometry: PackGeometry, bins: BinOptions
) -> tuple[Ints, Ints]:
    assert bins.max_tokens is not None
    capacity = bin_capacity(geometry, bins.max_tokens)
    padded = geometry.padded(lengths[kept])
    long = np.flatnonzero(padded > capacity)
    if len(long):
        row = int(kept[long[0]])
        raise RowsError(
            f"row {row} has {plural(lengths[row], 'token')}, {padded[long[0]]} padded slots, more "
            f"than the {capacity} that --max-tokens {bins.max_tokens} leaves; raise it to at least "
            f"{geometry.padded_total(int(padded.max()))}"
        )
    found = pack_bins(
        padded,
        capacity,
        algorithm=bins.algorithm,
        seed=bins.seed,
        min_bins=bins.min_bins,
        bins_multiple_of=bins.bins_multiple_of,
    )
    return kept[found.order], np.asarray(found.offsets, dtype=np.int64)


def utilisation(plan: PackPlan) -> Utilisation:
    """How full the packs of a plan are (contract 5.1)."""
    geometry = plan.geometry
    real, padded = plan.lengths[plan.order], geometry.padded(plan.lengths[plan.order])
    loads = np.add.reduceat(real, plan.offsets[:-1])
    filled = np.add.reduceat(padded, plan.offsets[:-1])
    totals = [geometry.padded_total(int(total)) for total in filled]
    capacity = (
        max(totals)
        if plan.bins.max_tokens is None
        else bin_capacity(geometry, plan.bins.max_tokens)
    )
    return Utilisation(
        real_tokens=int(real.sum()),
        alignment_padding=int((padded - real).sum()),
        tail_padding=sum(totals) - int(filled.sum()),
        microbatches=plan.microbatches,
        lower_bound=-(-int(padded.sum()) // capacity),
        balance=float(loads.max() / loads.mean()),
        loads=tuple(loads.tolist()),
        totals=tuple(totals),
    )


def _rows(rows: Ints) -> str:
    named = ", ".join(str(row) for row in rows[:_NAMED])
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"
