"""The equivalence suite's rank-local part: what every rank makes of a case with the core.

The very same function runs on simulated ranks and in processes; what it returns is judged by
``ranks_judge`` against the slow statements of ``ranks_reference``.

Legend: R rows with a payload, S positions, V_local and D_local columns of one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opdtool.checks.ranks_cases import Case
from opdtool.core import masks, packing, teacher, vocab
from opdtool.core.geometry import PackGeometry
from opdtool.core.group import Group


class Place(Protocol):
    """The part of a rank's topology that the suite uses."""

    @property
    def tp_rank(self) -> int: ...

    @property
    def tp_size(self) -> int: ...

    @property
    def cp_rank(self) -> int: ...

    @property
    def cp_size(self) -> int: ...

    @property
    def tp_group(self) -> Group: ...

    @property
    def cp_group(self) -> Group: ...

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What one rank made of one case: tensors by name, and the digests of all of them.

    Tensors that all tensor-parallel ranks have in common come from the first one alone.
    """

    tensors: dict[str, Tensor]
    digests: dict[str, str]


def rank_outputs(place: Place, case: Case, geometries: Sequence[PackGeometry]) -> Outputs:
    """Everything that this rank computes of a case; names of a geometry begin with its number."""
    common: dict[str, Tensor] = {}
    for number, geometry in enumerate(geometries):
        made = _packs(place, case, geometry)
        common |= {f"{number}.{name}": tensor for name, tensor in made.items()}
    own = _logits(place, case) | _draft(place, case)
    for number, geometry in enumerate(geometries):
        own[f"{number}.packed-logits"] = _packed_logits(place, case, geometry)
    everything = {name: tensor.detach().cpu() for name, tensor in (common | own).items()}
    kept = everything if place.tp_rank == 0 else {name: everything[name] for name in own}
    return Outputs(kept, {name: _digest(tensor) for name, tensor in everything.items()})


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8) if tensor.numel() else torch.zeros(0)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _packs(place: Place, case: Case, geometry: PackGeometry) -> dict[str, Tensor]:
    """Ids, targets and the draft mask of this rank, and of the whole pack what rolling needs."""
    layout = geometry.layout(case.lengths)
    whole = layout.with_cp(1)
    ids = case.input_ids.to(place.device)
    token_mask, sample_mask = case.token_mask.to(place.device), case.sample_mask.to(place.device)
    real, padded = tuple(layout.cu_seqlens.tolist()), tuple(layout.cu_seqlens_padded.tolist())
    # Every token gets a number of its own, from 1, so that one can see where each went.
    numbers = torch.arange(1, ids.numel() + 1, device=ids.device).reshape(ids.shape)
    tagged = packing.pack(numbers, whole)
    return {
        "cu_seqlens": torch.from_numpy(layout.cu_seqlens),
        "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded),
        "whole": packing.pack_input_ids(ids, real, padded)[0],
        "unpacked": packing.unpack(
            packing.pack(ids, whole), whole, rows=case.rows, width=ids.shape[1]
        ),
        "ids": packing.pack_input_ids(ids, real, padded, place.cp_rank, place.cp_size)[0],
        "targets": packing.pack_input_ids(ids, real, padded, place.cp_rank, place.cp_size, -1)[0],
        "numbers": packing.pack(numbers, layout, cp_rank=place.cp_rank),
        "rolled": packing.roll_packed_seq_dim(tagged[None], padded, seq_dim=1)[0],
        "mask": masks.draft_token_mask(
            masks.token_weights(token_mask, sample_mask), layout, cp_rank=place.cp_rank
        ),
        "whole-mask": masks.pack_rolled_draft_token_mask(token_mask, sample_mask, real, padded)[0],
    }


def _logits(place: Place, case: Case) -> dict[str, Tensor]:
    """This rank's teacher logits: moved, multiplied, and routed to several heads."""
    hidden, logits = case.hidden.to(place.device), case.logits.to(place.device)
    R, S, V = logits.shape
    shard = V // place.tp_size
    step = 2 * place.cp_size if place.cp_size > 1 else 1
    student = logits.new_zeros(R, -(-S // step) * step // place.cp_size, shard)

    def rebuild(payload: Tensor, kind: str, heads: dict[int, Tensor] | None) -> Tensor:
        return teacher.reconstruct_opd_full_teacher_logits(
            payload,
            teacher_payload=kind,
            student_logits=student,
            vocab_parallel_rank=place.tp_rank,
            context_parallel_group=place.cp_group,
            teacher_output_layer_weight_by_index=heads,
        )

    mine = slice(place.tp_rank * shard, (place.tp_rank + 1) * shard)
    integer_heads = {t: head[mine].to(place.device) for t, head in enumerate(case.integer_heads)}
    return {
        "moved": rebuild(logits, "logits", None),
        "logits": rebuild(hidden, "hidden_states", {0: case.heads[0][mine].to(place.device)}),
        "routed": teacher.project_hidden_states_per_teacher(
            case.integers.to(place.device), integer_heads, torch.tensor(case.teacher)
        ),
    }


def _packed_logits(place: Place, case: Case, geometry: PackGeometry) -> Tensor:
    """This rank's logits of the payload's rows packed into one."""
    layout = geometry.layout(case.payload_lengths)
    row = packing.pack(case.hidden.to(place.device), layout.with_cp(1))[None]
    shard = len(case.heads[0]) // place.tp_size
    head = case.heads[0][place.tp_rank * shard : (place.tp_rank + 1) * shard]
    return teacher.reconstruct_opd_full_teacher_logits(
        row,
        teacher_payload="hidden_states",
        student_logits=row.new_zeros(1, layout.local_total, shard),
        vocab_parallel_rank=place.tp_rank,
        context_parallel_group=place.cp_group,
        teacher_output_layer_weight_by_index={0: head.to(place.device)},
        cu_seqlens_padded=layout.cu_seqlens_padded,
    )[0]


def _draft(place: Place, case: Case) -> dict[str, Tensor]:
    """This rank's draft columns, and the gradient that comes back to its vocabulary shard."""
    V, D = case.logits.shape[-1] // place.tp_size, len(case.d2t) // place.tp_size
    local = case.logits[..., place.tp_rank * V : (place.tp_rank + 1) * V].to(place.device)
    local = local.contiguous().requires_grad_()
    drafted = vocab.map_teacher_logits_to_draft_vocab(
        local, case.d2t, place.tp_rank, place.tp_group if place.tp_size > 1 else None
    )
    weights = case.draft_weights[..., place.tp_rank * D : (place.tp_rank + 1) * D]
    (gradient,) = torch.autograd.grad((drafted * weights.to(place.device)).sum(), local)
    return {"drafted": drafted, "gradient": gradient}
