"""The teacher's logits, rebuilt from what was transported: hidden states or logits.

Legend: B batch rows, S sequence positions, H hidden width, V_local the vocabulary shard of one
tensor-parallel rank, S_local the positions of one context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.group import group_rank_size
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import CuSeqlens, as_offsets, cp_window
from opdtool.core.packing import has_tangent
from opdtool.core.words import plural

PAYLOADS = ("hidden_states", "logits")
"""What a teacher payload can be."""

MULTIPLIABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that payloads, heads and compute dtypes may have."""


def project_hidden_states_per_teacher(
    payload: Tensor,
    weight_by_index: Mapping[int, Tensor],
    teacher_index: Tensor,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The logits [B, S, V_local] of each row's own teacher (contract 3.5).

        teacher_index 1 0 1:   row 0 -> head 1,  row 1 -> head 0,  row 2 -> head 1

    ``payload`` is [B, S, H]; ``weight_by_index`` maps a teacher's index to its head
    [V_local, H]; ``teacher_index`` [B] is an integer tensor on any device. The payload is
    cast to the head's dtype before the product, one product a distinct teacher. The result has
    the head's dtype, or ``output_dtype``: then the operands, cast as before, are multiplied in
    that dtype, so that nothing is rounded on the way.

    Raises:
        InputError: the index has not one integer entry per row, a row names a head that is not
            loaded, a head is no [V_local, H] of the payload's width, the loaded heads disagree
            on the vocabulary shard or the dtype, or a dtype that cannot be multiplied.
    """
    check_heads(payload.shape[-1], weight_by_index)
    check_multipliable("the payload", payload.dtype)
    _check_output_dtype(output_dtype)
    if payload.ndim != 3:
        raise InputError(f"the payload has shape {list(payload.shape)}; expected [B, S, H]")
    routes = _routes(teacher_index, payload.shape[0], "row")
    check_routes(routes, weight_by_index)
    distinct = sorted(set(routes))
    if len(distinct) <= 1:
        head = weight_by_index[distinct[0]] if distinct else next(iter(weight_by_index.values()))
        return _project(payload, head, output_dtype)
    shard, dtype = _shard_and_dtype(weight_by_index)
    logits = payload.new_empty((*payload.shape[:-1], shard), dtype=output_dtype or dtype)
    for index in distinct:
        rows = torch.tensor([b for b, t in enumerate(routes) if t == index], device=payload.device)
        part = _project(payload.index_select(0, rows), weight_by_index[index], output_dtype)
        logits.index_copy_(0, rows, part)
    return logits


def reconstruct_opd_full_teacher_logits(
    payload: Tensor,
    *,
    teacher_payload: str,
    student_logits: Tensor,
    vocab_parallel_rank: int | None,
    context_parallel_group: object | None,
    teacher_output_layer_weight_by_index: Mapping[int, Tensor] | None = None,
    teacher_index: Tensor | None = None,
    cu_seqlens_padded: CuSeqlens | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's teacher logits [B, S_local, V_local], beside its ``student_logits`` (3.6).

    ``payload`` is [B, S, H] (``teacher_payload`` ``"hidden_states"``) or [B, S, V]
    (``"logits"``). Logits are cut to the vocabulary window of ``vocab_parallel_rank``. The
    sequence is zero-padded to S_local * CP and cut to this rank's context-parallel window; only
    then are hidden states projected, through heads [V_local, H] that are already this rank's
    shard.

        S 6, S_local 4, CP 2:    0 1 | 2 3 | 4 5 | . .
                  rank:           0  |  1  |  1  |  0     rank 0 holds 0 1 . .

    ``cu_seqlens_padded`` [N+1] says that the one row (B = 1) is a pack of N segments: each is
    cut by itself, and ``teacher_index`` has one entry a segment (a tail segment has one too:
    what it names is projected for its padding).

    The result is on the device of ``student_logits``, in the head's dtype (hidden states) or the
    payload's (logits), or in ``output_dtype``. Its storage is no larger than itself; where
    nothing was cut it may be the payload.

    Raises:
        InputError: an unknown ``teacher_payload``; logits narrower than the window's end, or no
            ``vocab_parallel_rank`` for them; a payload longer than S_local * CP; an odd S_local
            with CP > 1; no loaded head, several heads without an index, heads of another width
            than the payload's or another shard than V_local; a group that this process is no
            member of; and all that
            :func:`project_hidden_states_per_teacher` refuses.
    """
    if teacher_payload not in PAYLOADS:
        raise InputError(
            f"teacher_payload is {teacher_payload!r}; it is 'hidden_states' or 'logits'"
        )
    for name, tensor in (("payload", payload), ("student_logits", student_logits)):
        if tensor.ndim != 3:
            raise InputError(f"{name} has shape {list(tensor.shape)}; expected three dimensions")
    if payload.shape[0] != student_logits.shape[0]:
        raise InputError(
            f"payload has {plural(payload.shape[0], 'row')} and student_logits "
            f"{student_logits.shape[0]}; both must hold the same rows"
        )
    _check_output_dtype(output_dtype)
    B, S_local, V_local = student_logits.shape
    cp_rank, cp_size = group_rank_size(context_parallel_group, "context_parallel_group")
    layout = _layout(payload.shape[:2], S_local, cp_size, cu_seqlens_padded)
    device = student_logits.device
    if teacher_payload == "logits":
        window = _vocab_window(payload.shape[-1], V_local, vocab_parallel_rank)
        narrowed = _cut(payload[..., window], S_local, cp_rank, cp_size, layout, device)
        if output_dtype is not None:
            narrowed = narrowed.to(output_dtype)
        cut = narrowed.shape != payload.shape
        return _compact(narrowed) if cut else narrowed
    heads = _heads_for(payload.shape[-1], V_local, teacher_output_layer_weight_by_index)
    routes = _route_rows(heads, teacher_index, B, layout)
    narrowed = _cut(payload, S_local, cp_rank, cp_size, layout, device)
    if layout is None or len(heads) == 1 or layout.num_segments == 0:
        return project_hidden_states_per_teacher(narrowed, heads, routes[:B], output_dtype)
    # In a pack every slot is routed by its segment: slots become rows of one position.
    local = torch.from_numpy(layout.padded_lengths // cp_size)
    by_slot = torch.repeat_interleave(routes, local)
    logits = project_hidden_states_per_teacher(
        narrowed.transpose(0, 1), heads, by_slot, output_dtype
    )
    return logits.transpose(0, 1)


def check_heads(width: int, heads: Mapping[int, Tensor]) -> None:
    """Refuse heads that cannot project a payload of ``width``, or that disagree.

    Every loaded head is looked at, whether a row uses it or not.
    """
    if not heads:
        raise InputError("no teacher head is loaded; pass one [V_local, H] weight a teacher")
    first = next(iter(heads))
    for index, head in heads.items():
        if head.ndim != 2:
            raise InputError(
                f"the head of teacher {index} has shape {list(head.shape)}; expected [V_local, H]"
            )
        check_multipliable(f"the head of teacher {index}", head.dtype)
        if head.shape[1] != width:
            turned = "; it looks transposed" if head.shape[0] == width else ""
            raise InputError(
                f"the head of teacher {index} has shape {list(head.shape)}, width "
                f"{head.shape[1]}, but the payload's width is {width}{turned}; pass the "
                "[V_local, H] weight of the model that made the payload"
            )
        if head.shape[0] != heads[first].shape[0]:
            raise InputError(
                f"the heads of teachers {first} and {index} have vocabulary shards of "
                f"{heads[first].shape[0]} and {plural(head.shape[0], 'row')}; all must be this "
                "rank's shard of one vocabulary"
            )
        if head.dtype != heads[first].dtype:
            raise InputError(
                f"the heads of teachers {first} and {index} have dtypes {heads[first].dtype} "
                f"and {head.dtype}; load all heads in one dtype"
            )


def check_routes(routes: Sequence[int], heads: Mapping[int, object], *, word: str = "row") -> None:
    """Refuse a route to a head that is not loaded, naming the first row and the loaded heads."""
    for row, index in enumerate(routes):
        if index not in heads:
            loaded = ", ".join(str(i) for i in sorted(heads)) or "none"
            raise InputError(
                f"{word} {row} names teacher {index}, whose head is not loaded "
                f"(loaded: {loaded}); load that head or mend opd_full_teacher_index"
            )


def rms_norm(hidden: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """The RMSNorm of ``hidden`` [..., H] with ``weight`` [H], in the dtype of ``hidden``.

    hidden / sqrt(mean(hidden^2) + eps) * (offset + weight), computed in float32 (float64 for
    float64) and rounded once. ``offset`` is 1 for models that store the weight less one.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    x = hidden.to(wide)
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * (weight.to(wide) + offset)).to(hidden.dtype)


def _project(payload: Tensor, head: Tensor, output_dtype: torch.dtype | None) -> Tensor:
    head = head.to(payload.device)
    rows = payload.to(head.dtype)
    if output_dtype is None or output_dtype == head.dtype:
        return rows @ head.t()
    if output_dtype.itemsize > head.dtype.itemsize:
        return rows.to(output_dtype) @ head.to(output_dtype).t()
    return (rows @ head.t()).to(output_dtype)


def _shard_and_dtype(heads: Mapping[int, Tensor]) -> tuple[int, torch.dtype]:
    head = next(iter(heads.values()))
    return head.shape[0], head.dtype


def _heads_for(
    width: int, V_local: int, heads: Mapping[int, Tensor] | None
) -> Mapping[int, Tensor]:
    if not heads:
        raise InputError(
            "no teacher head is loaded, but the payload is hidden states; "
            "pass teacher_output_layer_weight_by_index"
        )
    check_heads(width, heads)
    shard, _ = _shard_and_dtype(heads)
    if shard != V_local:
        raise InputError(
            f"the teacher heads project to {plural(shard, 'column')}, but student_logits has a "
            f"vocabulary shard of {V_local}; pass this rank's rows of the head"
        )
    return heads


def _route_rows(
    heads: Mapping[int, Tensor], teacher_index: Tensor | None, B: int, layout: PackedLayout | None
) -> Tensor:
    """The head of every row, or of every segment of a pack, int64 on the CPU."""
    units, word = (B, "row") if layout is None else (layout.num_segments, "segment")
    if teacher_index is None:
        if len(heads) > 1:
            raise InputError(
                f"{len(heads)} teacher heads are loaded but no teacher_index says which "
                f"{word} is whose; pass teacher_index, one entry a {word}"
            )
        return torch.full((max(units, B),), next(iter(heads)), dtype=torch.int64)
    routes = _routes(teacher_index, units, word)
    check_routes(routes, heads, word=word)
    # A single head serves the whole pack, so the pack's one row is routed to it.
    return torch.tensor(routes or [next(iter(heads))] * B, dtype=torch.int64)


def _routes(teacher_index: Tensor, units: int, word: str) -> list[int]:
    teacher_index = torch.as_tensor(teacher_index)
    if teacher_index.is_floating_point() or teacher_index.is_complex():
        raise InputError(f"teacher_index is {teacher_index.dtype}; expected an integer dtype")
    if teacher_index.dtype == torch.bool:
        raise InputError("teacher_index is torch.bool; expected an integer dtype")
    flat = teacher_index.reshape(-1)
    if len(flat) != units:
        tail = ", a tail segment included" if word == "segment" else ""
        raise InputError(
            f"teacher_index has {plural(len(flat), 'entry')} for {plural(units, word)} of the "
            f"payload; pass one entry a {word}{tail}"
        )
    return [int(t) for t in flat.tolist()]


def _vocab_window(V: int, V_local: int, rank: int | None) -> slice:
    if rank is None:
        raise InputError(
            "vocab_parallel_rank is None, but a logits payload is cut by it; "
            "pass this rank's place in the tensor-parallel group (0 without one)"
        )
    if rank < 0:
        raise InputError(f"vocab_parallel_rank is {rank}; ranks count from 0")
    end = (rank + 1) * V_local
    if end > V:
        raise InputError(
            f"the payload has {plural(V, 'column')}, but the vocabulary window of rank {rank} is "
            f"[{rank * V_local}, {end}); the payload must hold the whole vocabulary"
        )
    return slice(rank * V_local, end)


def _layout(
    shape: torch.Size, S_local: int, cp_size: int, cu_seqlens_padded: CuSeqlens | None
) -> PackedLayout | None:
    """The pack that the row is, or None; and all refusals of lengths."""
    B, length = shape
    if cp_size > 1 and S_local % 2:
        raise InputError(
            f"student_logits has {plural(S_local, 'position')} a rank with CP {cp_size}; a rank "
            "holds two equal chunks, so S_local must be even"
        )
    slots = S_local * cp_size
    if length > slots:
        raise InputError(
            f"the payload has {plural(length, 'position')}, more than S_local {S_local} x CP "
            f"{cp_size} = {slots} of the student; pad the student's sequence, or cut the payload"
        )
    if cu_seqlens_padded is None:
        return None
    if B != 1:
        raise InputError(f"cu_seqlens_padded describes one packed row, but the payload has {B}")
    offsets = as_offsets(cu_seqlens_padded, "cu_seqlens_padded")
    layout = PackedLayout.from_cu_seqlens(offsets, offsets, cp_size=cp_size)
    if layout.total != slots:
        raise InputError(
            f"cu_seqlens_padded ends at {layout.total}, but the student has S_local {S_local} x "
            f"CP {cp_size} = {plural(slots, 'slot')}"
        )
    return layout


def _cut(
    payload: Tensor,
    S_local: int,
    cp_rank: int,
    cp_size: int,
    layout: PackedLayout | None,
    device: torch.device,
) -> Tensor:
    """This rank's positions of the payload [B, S_local, ...], zero past its end, on ``device``."""
    if cp_size == 1:
        return _window(payload, slice(0, S_local), device)
    if layout is None:
        first, second = cp_window(S_local * cp_size, cp_rank, cp_size)
        windows = [first, second]
    else:
        windows = []
        for b in range(layout.num_segments):
            base, length = int(layout.cu_seqlens_padded[b]), int(layout.padded_lengths[b])
            for part in cp_window(length, cp_rank, cp_size):
                windows.append(slice(base + part.start, base + part.stop))
    if not windows:
        return payload[:, :0].to(device)
    return torch.cat([_window(payload, window, device) for window in windows], dim=1)


def _window(payload: Tensor, window: slice, device: torch.device) -> Tensor:
    real = payload[:, min(window.start, payload.shape[1]) : window.stop].to(device)
    missing = window.stop - window.start - real.shape[1]
    if not missing:
        return real
    return torch.nn.functional.pad(real, (0, 0, 0, missing))


def _compact(tensor: Tensor) -> Tensor:
    """The tensor in a storage of its own size."""
    # Under torch.func a tensor shows no storage.
    if (
        has_tangent(tensor)
        or tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    ):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _check_output_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in MULTIPLIABLE:
        raise InputError(
            f"output_dtype is {dtype}; expected one that a product can be in: torch.float32, "
            "bfloat16, float16 or float64"
        )


def check_multipliable(what: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that no projection is computed in (integers, fp8)."""
    if dtype not in MULTIPLIABLE:
        raise InputError(
            f"{what} has dtype {str(dtype).removeprefix('torch.')}, which cannot be multiplied; "
            "expected float32, bfloat16, float16 or float64 (dequantise it first)"
        )
