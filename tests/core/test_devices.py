"""Tensors of another device: "meta" holds no values, so whatever reads one there fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opdtool.core.layout import PackedLayout
from opdtool.core.masks import pack_rolled_draft_token_mask
from opdtool.core.packing import gather_cp, pack, pack_input_ids, roll_packed_seq_dim, unpack
from opdtool.core.teacher import (
    project_hidden_states_per_teacher,
    reconstruct_opd_full_teacher_logits,
)
from opdtool.core.vocab import map_teacher_logits_to_draft_vocab

CU, PADDED = (0, 3, 5), (0, 4, 8)
LAYOUT = PackedLayout.from_cu_seqlens(CU, PADDED, cp_size=2)
HEADS = {0: torch.ones(6, 3, device="meta"), 1: torch.ones(6, 3, device="meta")}


def test_a_value_of_the_meta_device_cannot_be_read() -> None:
    with pytest.raises(RuntimeError):
        torch.ones(1, device="meta").item()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x: pack_input_ids(x, CU, PADDED), (1, 8)),
        (lambda x: pack_input_ids(x, CU, PADDED, 1, 2, -1), (1, 4)),
        (lambda x: pack_input_ids(x, (0, 0, 0), PADDED, 1, 2, -1), (1, 4)),
        (lambda x: roll_packed_seq_dim(x, (0, 1, 3), 1), (2, 3)),
        (lambda x: pack_rolled_draft_token_mask(x, x[:, 0], CU, PADDED), (1, 8)),
        (lambda x: pack(x, LAYOUT, cp_rank=1, shift=-1), (4,)),
        (lambda x: gather_cp([pack(x, LAYOUT, cp_rank=r) for r in (0, 1)], LAYOUT), (8,)),
        (lambda x: unpack(pack(x, LAYOUT.with_cp(1)), LAYOUT, rows=2, width=3), (2, 3)),
    ],
)
def test_with_tuples_of_ints_no_value_of_the_device_is_read(
    call: Callable[[Tensor], Tensor], shape: tuple[int, ...], grad: bool, dtype: torch.dtype
) -> None:
    x = torch.ones(2, 3, device="meta").to(dtype)
    if grad and not dtype.is_floating_point:
        pytest.skip("integers have no gradient")
    found = call(x.requires_grad_(grad))
    assert (found.device.type, found.dtype, tuple(found.shape)) == ("meta", dtype, shape)
    assert found.requires_grad == grad


def test_a_map_may_be_on_another_device_than_the_logits() -> None:
    logits = torch.ones(2, 1, 8, dtype=torch.float16, device="meta")
    found = map_teacher_logits_to_draft_vocab(logits, torch.tensor([1, 1, 3, 4]))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float16, (2, 1, 4))


@pytest.mark.parametrize("index", [[0, 1], [1, 1]])
def test_a_teacher_index_may_be_on_another_device_than_the_payload(index: list[int]) -> None:
    payload = torch.ones(2, 5, 3, device="meta")
    routes = torch.tensor(index)
    found = project_hidden_states_per_teacher(payload, HEADS, routes, torch.float64)
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float64, (2, 5, 6))


@pytest.mark.parametrize("kind", ["hidden_states", "logits"])
def test_the_narrowed_payload_goes_to_the_device_of_the_student(kind: str) -> None:
    found = reconstruct_opd_full_teacher_logits(
        torch.ones(2, 5, 3),
        teacher_payload=kind,
        student_logits=torch.ones(2, 6, 6 if kind == "hidden_states" else 2, device="meta"),
        vocab_parallel_rank=0,
        context_parallel_group=None,
        teacher_output_layer_weight_by_index={0: torch.ones(6, 3)},
        output_dtype=torch.float64,
    )
    width = 6 if kind == "hidden_states" else 2
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float64, (2, 6, width))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_with_tuples_of_ints_cuda_is_never_synchronised() -> None:
    x = torch.ones(2, 3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        pack_input_ids(x, CU, PADDED, 1, 2, -1)
        roll_packed_seq_dim(x, (0, 1, 3), 1)
        pack_rolled_draft_token_mask(x, x[:, 0], CU, PADDED)
    finally:
        torch.cuda.set_sync_debug_mode("default")
