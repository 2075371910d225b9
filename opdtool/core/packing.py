"""Packing rows into segments, unpacking them, rolling segments, gathering ranks back.

Legend: B batch rows, S row width, N segments, T packed slots, F any further dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd import forward_ad

from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import CuSeqlens, Ints, Pieces, as_offsets, check_offsets, runs
from opdtool.core.words import plural

_COPY_RUN = 64
"""Runs longer than this on average (in elements) are copied one by one; shorter are gathered."""

_GATHER_BLOCK = 1 << 15
"""Elements gathered at a time: fresh temporaries of megabytes cost more in page faults than
the gathering itself, small ones stay in the cache."""

Array = npt.NDArray[Any]

_BYTE_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(rows_BSF: Tensor, layout: PackedLayout, *, cp_rank: int = 0, shift: int = 0) -> Tensor:
    """One rank's slots of a token-aligned tensor: [B, S, ...] -> [T / cp_size, ...].

    Segment n holds the first ``min(length, S)`` tokens of row n, then zeros to its padded
    length, rolled circularly by ``shift`` (as ``torch.roll``), then cut to the rank's
    window; segments past the rows are empty. Keeps dtype and device; differentiable.

        rows [[a, b, c], [d, e, -]], lengths 3, 2, padded to 4:   a b c 0 d e 0 0

    Raises:
        InputError: fewer than two dimensions, fewer segments than rows, or a rank outside
            the layout's CP size.
    """
    if rows_BSF.ndim < 2:
        raise InputError(
            f"cannot pack a tensor of shape {list(rows_BSF.shape)}; expected [B,S,...]"
        )
    pieces = layout.pieces(cp_rank, shift=shift, limit=rows_BSF.shape[1])
    return fill_pieces(rows_BSF, pieces, layout.local_total, segments=layout.num_segments)


def fill_pieces(
    rows_BSF: Tensor, pieces: Pieces, slots: int, *, segments: int | None = None
) -> Tensor:
    """A tensor [slots, ...], zero but for the pieces, each taken from the row of its segment.

    Raises:
        InputError: ``segments``, when given, are fewer than the rows.
    """
    B, S = rows_BSF.shape[:2]
    if segments is not None and segments < B:
        raise InputError(
            f"the cumulative lengths describe {plural(segments, 'sequence')} "
            f"but the batch has {plural(B, 'row')}; pass one more offset than there are rows"
        )
    dst, src, count = pieces.dst, pieces.segment * S + pieces.position, pieces.count
    if len(dst) and int(pieces.segment[-1]) >= B:
        real = pieces.segment < B
        dst, src, count = dst[real], src[real], count[real]
    return _fill(rows_BSF.reshape(B * S, *rows_BSF.shape[2:]), dst, src, count, slots)


def _fill(flat: Tensor, dst: Ints, src: Ints, count: Ints, slots: int) -> Tensor:
    """A tensor of ``slots`` rows, zero but for the runs copied from ``flat``."""
    if differentiated(flat) or flat.device.type != "cpu" or flat.element_size() not in _BYTE_VIEWS:
        return _fill_on_device(flat, dst, src, count, slots)
    # On the host numpy moves plain integers of the same size: no thread pool to wake, every
    # dtype alike.
    source = _as_integers(flat).numpy()
    out = np.zeros((slots, *source.shape[1:]), dtype=source.dtype)
    if out.size and len(dst):
        long = int(count.sum()) * source[0].size >= _COPY_RUN * len(dst)
        (_copy_runs if long else _gather_runs)(out, source, dst, src, count)
    return torch.from_numpy(out).view(flat.dtype)


def differentiated(tensor: Tensor) -> bool:
    """Whether a derivative is taken through ``tensor``, backward or forward: torch's own
    operations carry it, its bits as integers, or in numpy, do not."""
    return tensor.requires_grad or has_tangent(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a dual number of forward mode, or inside a transform of
    ``torch.func``."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _as_integers(tensor: Tensor) -> Tensor:
    """The same bits as integers of their size; the same memory where it is contiguous."""
    return tensor.contiguous().view(_BYTE_VIEWS[tensor.element_size()])


def _copy_runs(out: Array, source: Array, dst: Ints, src: Ints, count: Ints) -> None:
    """Run i of ``source``, from ``src[i]``, copied to ``dst[i]`` of ``out``, one by one.

    Through views of bytes, where a copy costs two thirds of the same statement on arrays.
    """
    to_bytes = out.reshape(-1).data.cast("B")
    from_bytes = source.reshape(-1).data.cast("B")
    byte_runs = np.stack([dst, src, count]) * source[0].nbytes
    for to, at, n in zip(*byte_runs.tolist(), strict=True):
        to_bytes[to : to + n] = from_bytes[at : at + n]


def _gather_runs(out: Array, source: Array, dst: Ints, src: Ints, count: Ints) -> None:
    """What :func:`_copy_runs` does, by indices, a block of runs at a time."""
    ends = np.cumsum(count)
    block = max(_GATHER_BLOCK // source[0].size, 1)
    edges = np.unique(np.searchsorted(ends, np.arange(0, ends[-1], block))).tolist()
    for begin, end in pairwise([*edges, len(dst)]):
        to, at, n = dst[begin:end], src[begin:end], count[begin:end]
        out[runs(to, n)] = source.take(runs(at, n), axis=0, mode="clip")


def _fill_on_device(flat: Tensor, dst: Ints, src: Ints, count: Ints, slots: int) -> Tensor:
    # A rank whose window holds no token keeps its place in the graph too: its backward pass
    # may be a collective that the other ranks wait in.
    values = flat.index_select(0, _device_runs(src, count, flat.device))
    if len(values) == slots:
        return values
    out = flat.new_zeros(slots, *flat.shape[1:])
    return out.index_copy(0, _device_runs(dst, count, flat.device), values)


def _device_runs(start: Ints, count: Ints, device: torch.device) -> Tensor:
    """:func:`opdtool.core.offsets.runs`, made on the device from one number a run."""
    total = int(count.sum())
    before = np.cumsum(count) - count
    offset, repeats = to_device(start - before, device), to_device(count, device)
    each = torch.repeat_interleave(offset, repeats, output_size=total)
    return each.add_(torch.arange(total, device=device))


def to_device(values: Ints, device: torch.device) -> Tensor:
    """Host integers as an int64 tensor on ``device``, without synchronising it."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pack_input_ids(
    input_ids: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_q_padded: CuSeqlens,
    cp_rank: int = 0,
    cp_size: int = 1,
    roll_shift: int = 0,
) -> Tensor:
    """One rank's packed ids: [B, S] -> [1, T / cp_size] (contract 3.1).

    Row b fills a zeroed segment of its padded length with its first min(actual, S) tokens;
    the padded segment is rolled circularly by ``roll_shift`` and cut to the rank's zig-zag
    window. Cumulative lengths are [N+1] with N >= B; a tuple of ints costs no device
    synchronisation, a tensor costs one.

    Raises:
        InputError: a padded length that is no multiple of 2 * cp_size (cp_size > 1), or
            min(actual, S) above the padded length; both name the sequence.
    """
    if input_ids.ndim != 2:
        raise InputError(f"input_ids has shape {list(input_ids.shape)}; expected [B,S]")
    layout = _clamped_layout(cu_seqlens_q, cu_seqlens_q_padded, input_ids.shape[1], cp_size)
    return pack(input_ids, layout, cp_rank=cp_rank, shift=roll_shift).unsqueeze(0)


def _clamped_layout(
    cu_seqlens: CuSeqlens, cu_seqlens_padded: CuSeqlens, width: int, cp_size: int
) -> PackedLayout:
    """The layout of min(actual, width) tokens a row: the last actual length may be inflated
    by the bin's padding, so offsets are rebuilt from the clamped lengths."""
    real = as_offsets(cu_seqlens, "cu_seqlens")
    padded = as_offsets(cu_seqlens_padded, "cu_seqlens_padded")
    if len(real) == len(padded) and len(real) > 1:
        lengths = np.diff(real)
        if lengths.max() > width:
            check_offsets("cu_seqlens", real)  # as they were given
            lengths = np.minimum(lengths, width)
            real = np.concatenate([real[:1], real[0] + np.cumsum(lengths)])
    return PackedLayout.from_cu_seqlens(real, padded, cp_size=cp_size)


def roll_packed_seq_dim(tensor: Tensor, cu_seqlens_padded: CuSeqlens, seq_dim: int) -> Tensor:
    """``tensor`` shifted left by one along ``seq_dim`` inside each segment (contract 3.2).

    Each segment's final slot becomes zero. Keeps shape, dtype and device; differentiable.

        a b c | d e      (cu_seqlens_padded 0 3 5)
        b c 0 | e 0

    Raises:
        InputError: no such dimension, or its length is not ``cu_seqlens_padded[-1]``.
    """
    layout = rolled_layout(tensor.shape, cu_seqlens_padded, seq_dim)
    last = layout.cu_seqlens_padded[1:][layout.padded_lengths > 0] - 1
    plain = differentiated(tensor) or tensor.element_size() not in _BYTE_VIEWS
    values = tensor if plain else _as_integers(tensor)  # torch rolls not every dtype
    rolled = torch.roll(values, -1, seq_dim)
    rolled = rolled.index_fill(seq_dim, to_device(last, tensor.device), 0)
    return rolled if plain else rolled.view(tensor.dtype)


def rolled_layout(shape: Sequence[int], cu_seqlens_padded: CuSeqlens, seq_dim: int) -> PackedLayout:
    """The segments in which a tensor of this shape is rolled along ``seq_dim``.

    Raises:
        InputError: no such dimension, or its length is not ``cu_seqlens_padded[-1]``.
    """
    if not -len(shape) <= seq_dim < len(shape):
        raise InputError(f"seq_dim {seq_dim} is no dimension of shape {list(shape)}")
    offsets = as_offsets(cu_seqlens_padded, "cu_seqlens_padded")
    layout = PackedLayout.from_cu_seqlens(offsets, offsets)
    if shape[seq_dim] != layout.total:
        raise InputError(
            f"dimension {seq_dim} has {plural(shape[seq_dim], 'slot')} but cu_seqlens_padded ends "
            f"at {layout.total}; roll the whole pack, before any context-parallel cut"
        )
    return layout


def unpack(packed_TF: Tensor, layout: PackedLayout, *, rows: int, width: int) -> Tensor:
    """The padded batch behind a whole pack: [T, ...] -> [rows, width, ...].

    Segment n goes to row ``layout.sequence_index[n]``; padding and rows that the pack does
    not hold are zero. ``unpack(pack(x)) == x`` on real tokens.

    Raises:
        InputError: the pack has not T slots, a row is outside the batch or named twice, or a
            sequence is longer than ``width``.
    """
    if packed_TF.shape[0] != layout.total:
        raise InputError(
            f"the pack has {plural(packed_TF.shape[0], 'slot')} but cu_seqlens_padded ends at "
            f"{layout.total}; gather the context-parallel shards first"
        )
    n = layout.num_rows
    lengths, index = layout.lengths[:n], layout.sequence_index
    named, times = np.unique(index, return_counts=True)
    if len(named) < n:
        twice = named[times > 1][0]
        raise InputError(f"sequence_index names row {twice} twice; one segment of it would be lost")
    outside = index[(index < 0) | (index >= rows)]
    if len(outside):
        raise InputError(
            f"sequence_index names row {outside[0]}, outside the {plural(rows, 'row')}"
        )
    if n and lengths.max() > width:
        raise InputError(
            f"sequence {int(np.argmax(lengths))} has {plural(lengths.max(), 'token')}, "
            f"more than the row width {width}"
        )
    keep = lengths > 0
    order = np.argsort(index[keep], kind="stable")
    dst, src, count = (
        values[keep][order] for values in (index * width, layout.cu_seqlens_padded[:n], lengths)
    )
    flat = _fill(packed_TF, dst, src, count, rows * width)
    return flat.reshape(rows, width, *packed_TF.shape[1:])


def gather_cp(shards: Sequence[Tensor], layout: PackedLayout) -> Tensor:
    """The whole pack from its context-parallel shards: cp_size x [T/cp_size, ...] -> [T, ...].

    Raises:
        InputError: not one shard a rank, a shard without T / cp_size slots, or shards that
            differ in dtype, device or their further dimensions.
    """
    if len(shards) != layout.cp_size:
        raise InputError(
            f"{plural(len(shards), 'shard')} for cp_size {layout.cp_size}; expected one a rank"
        )
    _check_shards(shards, layout)
    if layout.cp_size == 1:
        return shards[0]
    slots = [layout.global_slots(rank) for rank in range(layout.cp_size)]
    if any(map(differentiated, shards)) or shards[0].element_size() not in _BYTE_VIEWS:
        order = torch.cat(slots).argsort().to(shards[0].device)
        return torch.cat(list(shards)).index_select(0, order)
    # As integers: torch cannot copy unsigned and 8-bit float dtypes by index.
    out = _as_integers(shards[0]).new_empty(layout.total, *shards[0].shape[1:])
    for place, shard in zip(slots, shards, strict=True):
        out.index_copy_(0, place.to(out.device), _as_integers(shard))
    return out.view(shards[0].dtype)


def _check_shards(shards: Sequence[Tensor], layout: PackedLayout) -> None:
    first = shards[0]
    for rank, shard in enumerate(shards):
        if shard.ndim == 0:
            raise InputError(f"the shard of cp_rank {rank} has shape []; expected [T/cp_size, ...]")
        if shard.shape[0] != layout.local_total:
            raise InputError(
                f"the shard of cp_rank {rank} has {plural(shard.shape[0], 'slot')}; expected "
                f"{layout.local_total} (T {layout.total} / cp_size {layout.cp_size})"
            )
        mine, others = (
            f"{each.dtype} {list(each.shape)} on {each.device}" for each in (shard, first)
        )
        if mine != others:
            raise InputError(
                f"the shard of cp_rank {rank} is {mine}, that of cp_rank 0 is {others}; "
                "shards of one tensor are alike"
            )


def pack_positions(
    layout: PackedLayout, *, cp_rank: int = 0, start: int = 0, stop: int | None = None
) -> Tensor:
    """Position ids of one rank's local slots [start, stop), int64 [stop - start]: from 0 in
    each segment, running on through its padding."""
    return layout.local_positions(cp_rank, start, stop)
