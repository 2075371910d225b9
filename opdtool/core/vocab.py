"""The draft vocabulary: its maps, its choice, and the teacher's columns that it keeps.

A draft model has D output classes out of the target's V tokens. ``d2t`` holds offsets: draft
id i stands for target id ``i + d2t[i]``. ``t2d`` says of every target id whether it is one of
them.

    draft id     0  1  2  3
    d2t          1  1  3  4      (offsets, not ids)
    target id    1  2  5  7
    t2d          0 1 1 0 0 1 0 1 (V 8)

Legend: B rows, S positions, V target vocabulary, D draft vocabulary, V_local = V / size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from opdtool.core.counting import total_of
from opdtool.core.errors import InputError
from opdtool.core.exchange import ColumnPlan, exchange_columns
from opdtool.core.group import Group, TorchGroup, group_rank_size, is_group
from opdtool.core.offsets import as_offsets
from opdtool.core.packing import has_tangent
from opdtool.core.words import plural


def map_teacher_logits_to_draft_vocab(
    teacher_logits: Tensor,
    d2t: Tensor | None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: object | None = None,
) -> Tensor:
    """Teacher logits over the draft vocabulary: column i is teacher column ``i + d2t[i]``.

    Under a group the input is this rank's contiguous shard of the vocabulary and the result
    its contiguous shard of the draft vocabulary; each rank sends each other one only the
    columns that it owns and the other wants. The gradient travels back the same way and is
    summed into the owner's columns, from all ranks. Contract 3.4.

    Args:
        teacher_logits: [B, S, V_local]; any leading dimensions will do.
        d2t: [D] offsets, any integer dtype, on any device; None returns ``teacher_logits``.
        vocab_parallel_rank: this rank; asked of the group when absent.
        vocab_parallel_group: one of ours, a ``torch.distributed`` group, or None when
            ``teacher_logits`` has all columns.

    Returns:
        [B, S, D_local] with the dtype and device of ``teacher_logits``.

    Raises:
        InputError: D or V does not divide by the group's size; a target id lies outside
            [0, V); the rank is not the group's, or neither it nor the group tells it; the
            ranks bring different maps or shapes.
    """
    if d2t is None:
        return teacher_logits
    rank, size = _place(vocab_parallel_rank, vocab_parallel_group)
    if size == 1:
        _check_logits(teacher_logits)
        ids = ids_from_d2t(d2t, teacher_logits.shape[-1])
        return teacher_logits.index_select(-1, ids.to(teacher_logits.device))
    group = (
        vocab_parallel_group
        if is_group(vocab_parallel_group)
        else TorchGroup(vocab_parallel_group, place=(rank, size))
    )
    # What the ranks must share is compared first: then a refusal is every rank's refusal.
    _check_agreement(teacher_logits, d2t, group)
    _check_logits(teacher_logits)
    V_local = teacher_logits.shape[-1]
    ids = ids_from_d2t(d2t, V_local * size)
    _check_divisible("draft vocabulary", len(ids), size)
    plan = ColumnPlan.of(ids, V_local=V_local, rank=rank, size=size)
    return exchange_columns(teacher_logits, plan, group)


def ids_from_d2t(d2t: Tensor, vocab_size: int | None = None) -> Tensor:
    """Target ids [D] of a map of offsets: ``i + d2t[i]``, int64 on the CPU.

    Raises:
        InputError: ``d2t`` is not one-dimensional, empty or not integer, or an id lies
            outside [0, vocab_size), naming the first such entry.
    """
    offsets = integers("d2t", d2t)
    ids = torch.arange(len(offsets)) + offsets
    if vocab_size is not None:
        outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
        if len(outside):
            i = int(outside[0])
            raise InputError(
                f"d2t[{i}] is {int(offsets[i])}, so draft id {i} stands for target id "
                f"{int(ids[i])}, outside the vocabulary 0..{vocab_size - 1} ({len(outside)} of "
                f"{len(ids)} entries are); d2t holds offsets, not ids"
            )
    return ids


def d2t_from_ids(ids: Tensor) -> Tensor:
    """Offsets [D] int64 of a map that gives draft id i the target id ``ids[i]``."""
    ids = integers("ids", ids)
    return ids - torch.arange(len(ids))


def t2d_from_d2t(d2t: Tensor, vocab_size: int) -> Tensor:
    """[V] bool: whether each target id is in the draft vocabulary of ``d2t``."""
    return t2d_from_ids(ids_from_d2t(d2t, vocab_size), vocab_size)


def t2d_from_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """[V] bool: whether each target id is one of ``ids``.

    Raises:
        InputError: ids that are no integers, or lie outside [0, V).
    """
    if vocab_size < 0:
        raise InputError(f"a vocabulary of {vocab_size} ids is none")
    found = as_offsets(ids, "ids")
    outside = np.flatnonzero((found < 0) | (found >= vocab_size))
    if len(outside):
        raise InputError(
            f"ids[{outside[0]}] is {found[outside[0]]}, outside the vocabulary 0..{vocab_size - 1}"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.from_numpy(found)] = True
    return t2d


def choose_draft_vocab(counts: Tensor, size: int, must_include: Sequence[int] = ()) -> Tensor:
    """The ``size`` most frequent target ids [D], ascending.

    Ties go to the lower id, so ids that never occurred fill up from the lowest.
    ``must_include`` ids are in whatever their counts.

    Args:
        counts: [V] how often each id occurred.

    Raises:
        InputError: a count is negative or not finite, ``size`` is not in 1..V, a required id
            is none, or more are required than fit.
    """
    counts = _checked_counts(counts)
    V = len(counts)
    if not 1 <= size <= V:
        raise InputError(f"a draft vocabulary of {plural(size, 'id')} cannot be taken from {V}")
    required = sorted(set(as_offsets(tuple(must_include), "must_include").tolist()))
    if required and not (required[0] >= 0 and required[-1] < V):
        stray = next(i for i in required if not 0 <= i < V)
        raise InputError(f"required id {stray} is outside the vocabulary 0..{V - 1}")
    if len(required) > size:
        raise InputError(
            f"{len(required)} ids are required but the draft vocabulary has {size}; "
            "require fewer or make it larger"
        )
    forced = torch.zeros(V, dtype=torch.bool)
    forced[torch.tensor(required, dtype=torch.int64)] = True
    order = torch.sort(counts, descending=True, stable=True).indices
    order = torch.cat([order[forced[order]], order[~forced[order]]])
    return order[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """The share of counted tokens whose id is one of ``ids``; nan when none was counted.

    Raises:
        InputError: a count is negative or not finite, or an id lies outside [0, V).
    """
    counts = _checked_counts(counts)
    total = total_of(counts)
    kept = total_of(counts[t2d_from_ids(ids, len(counts))])
    return float(kept / total) if total else float("nan")


def _checked_counts(counts: Tensor) -> Tensor:
    """Counts [V] on the CPU, int64 or float64. NaN would be chosen first, being greatest to a
    sort, and a negative count would lower the share of others."""
    if counts.dim() != 1:
        raise InputError(f"counts has shape {list(counts.shape)}; expected [V]")
    if counts.dtype == torch.bool or counts.is_complex():
        raise InputError(f"counts is {counts.dtype}; numbers were expected")
    wide = torch.float64 if counts.is_floating_point() else torch.int64
    numbers = counts.detach().cpu().to(wide)
    wrong = (~((numbers >= 0) & (numbers < torch.inf))).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise InputError(
            f"counts[{i}] is {counts[i].item()}; a count is finite, not below 0 and within int64"
        )
    return numbers


def integers(name: str, tensor: Tensor) -> Tensor:
    """A one-dimensional integer tensor as int64 on the CPU.

    Raises:
        InputError: naming ``name`` and what was found instead.
    """
    if tensor.dim() != 1 or len(tensor) == 0:
        raise InputError(
            f"{name} has shape {list(tensor.shape)}; one entry a draft id was expected"
        )
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise InputError(f"{name} is {tensor.dtype}; integers were expected")
    wide = tensor.detach().to("cpu").to(torch.int64)
    if tensor.dtype == torch.uint64 and bool((wide < 0).any()):
        raise InputError(f"{name} holds unsigned values past int64; save it as int64")
    return wide


def _place(rank: int | None, group: object | None) -> tuple[int, int]:
    """(rank, size), from the group, held against the rank that was given."""
    if group is None:
        if rank:
            raise InputError(
                f"vocab_parallel_rank is {rank} but there is no vocab_parallel_group to exchange "
                "columns in; pass the group, or the whole vocabulary and no rank"
            )
        return 0, 1
    own, size = group_rank_size(group, "vocab_parallel_group", rank)
    if rank is not None and rank != own:
        raise InputError(f"vocab_parallel_rank is {rank}, but the group says rank {own} of {size}")
    return own, size


def _check_logits(teacher_logits: Tensor) -> None:
    if teacher_logits.dim() == 0:
        raise InputError("teacher_logits is a scalar; [B, S, V] was expected")


def _check_divisible(what: str, total: int, size: int) -> None:
    if total % size:
        raise InputError(
            f"the {what} of {total} does not divide by tensor-parallel size {size}: "
            f"{total % size} left over; pad it to {total + size - total % size}"
        )


# Maps that hold the same ids in these dtypes are one map.
_ALIKE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


def _wants(teacher_logits: Tensor) -> int:
    """Which derivatives are taken through the exchange, each of which is an exchange too: a rank
    that took none would let the others wait."""
    backward = teacher_logits.requires_grad and torch.is_grad_enabled()
    return int(backward) + 2 * int(has_tangent(teacher_logits))


def _check_agreement(teacher_logits: Tensor, d2t: Tensor, group: Group) -> None:
    """Hold what every rank must bring alike equal over the group, before anything moves."""
    width = teacher_logits.shape[-1] if teacher_logits.dim() else 0
    lead = teacher_logits.shape[:-1].numel() if teacher_logits.dim() else 0
    values = d2t.detach().to("cpu").to(torch.int64).contiguous()
    words = [
        width,
        lead,
        _code(teacher_logits.dtype),
        0 if d2t.dtype in _ALIKE else _code(d2t.dtype),
        values.numel() if d2t.dim() == 1 else -d2t.dim(),
        zlib.crc32(values.numpy().tobytes()),
        _wants(teacher_logits),
    ]
    told = group.all_gather(torch.tensor(words, device=teacher_logits.device))
    rows = [row.tolist() for row in told]
    widths = [row[0] for row in rows]
    if len(set(widths)) > 1:
        _check_divisible("vocabulary", sum(widths), group.size)
        raise InputError(
            f"the ranks hold shards of {widths} columns; the vocabulary of {sum(widths)} must be "
            f"cut into {group.size} equal ones"
        )
    what = (
        "width",
        "count of positions",
        "dtype of teacher_logits",
        "dtype of d2t",
        "length of d2t",
        "d2t",
        "need of a derivative",
    )
    for rank, row in enumerate(rows):
        for name, mine, first in zip(what, row, rows[0], strict=True):
            if mine != first:
                raise InputError(f"rank {rank} brings another {name} than rank 0; all must agree")
