"""The rebuilt teacher logits of functions 5 and 6, and every refusal, clause by clause."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.teacher import (
    project_hidden_states_per_teacher,
    reconstruct_opd_full_teacher_logits,
    rms_norm,
)
from tests.reference.teacher import logits_of, owned_positions, shard_of


@dataclass(frozen=True)
class FakeGroup:
    """A group that only knows its place; the functions here exchange nothing."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        raise AssertionError("no exchange is wanted")

    def all_to_all(self, tensors: object) -> list[Tensor]:
        raise AssertionError("no exchange is wanted")


def whole(rows: int, cols: int, seed: int) -> Tensor:
    """Small whole numbers, so that products are exact in every dtype."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (rows, cols), generator=made).to(torch.float64)


HEADS = {3: whole(8, 4, 1), 7: whole(8, 4, 2)}
HIDDEN = torch.stack([whole(6, 4, seed) for seed in (3, 4, 5)])
INDEX = torch.tensor([7, 3, 7])


def reconstruct(
    payload: Tensor,
    *,
    student: tuple[int, int, int],
    group: object | None = None,
    rank: int | None = 0,
    kind: str = "hidden_states",
    **more: object,
) -> Tensor:
    return reconstruct_opd_full_teacher_logits(
        payload,
        teacher_payload=kind,
        student_logits=torch.empty(student),
        vocab_parallel_rank=rank,
        context_parallel_group=group,
        **more,  # type: ignore[arg-type]
    )


def test_each_row_goes_through_the_head_of_its_own_teacher() -> None:
    got = project_hidden_states_per_teacher(HIDDEN, HEADS, INDEX)
    want = logits_of(HIDDEN.numpy(), {i: w.numpy() for i, w in HEADS.items()}, [7, 3, 7])
    swapped = logits_of(HIDDEN.numpy(), {i: w.numpy() for i, w in HEADS.items()}, [3, 7, 3])
    assert not np.array_equal(want, swapped)
    assert np.array_equal(got.numpy(), want)


def test_a_hand_worked_projection() -> None:
    payload = torch.tensor([[[1.0, 2.0]], [[3.0, -1.0]]])
    heads = {0: torch.tensor([[1.0, 0.0], [0.0, 10.0]]), 1: torch.tensor([[5.0, 5.0], [0.0, 1.0]])}
    got = project_hidden_states_per_teacher(payload, heads, torch.tensor([1, 0]))
    assert got.tolist() == [[[15.0, 2.0]], [[3.0, -10.0]]]


def count_products(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Tensor]) -> list[int]:
    rows: list[int] = []
    plain = Tensor.__matmul__

    def counted(left: Tensor, right: Tensor) -> Tensor:
        rows.append(left.shape[0])
        return plain(left, right)

    monkeypatch.setattr(Tensor, "__matmul__", counted)
    run()
    monkeypatch.undo()
    return rows


def test_one_product_a_distinct_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = count_products(
        monkeypatch, lambda: project_hidden_states_per_teacher(HIDDEN, HEADS, INDEX)
    )
    assert sorted(rows) == [1, 2]


def test_one_present_teacher_needs_no_scatter_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    scattered: list[object] = []
    monkeypatch.setattr(Tensor, "index_copy_", lambda *args: scattered.append(args))
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kw: scattered.append(args))
    rows = count_products(
        monkeypatch,
        lambda: project_hidden_states_per_teacher(HIDDEN, HEADS, torch.tensor([7, 7, 7])),
    )
    assert rows == [3]
    assert scattered == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_payload_is_cast_to_the_dtype_of_the_head_and_so_is_the_result(
    dtype: torch.dtype,
) -> None:
    # 1 + 2^-12 survives float32 but not bfloat16 or float16: the cast comes before the product.
    payload = torch.tensor([[[1 + 2.0**-12]]], dtype=torch.float32)
    heads = {0: torch.tensor([[4096.0]], dtype=dtype)}
    got = project_hidden_states_per_teacher(payload, heads, torch.tensor([0]))
    assert got.dtype == dtype
    lossy = dtype in (torch.bfloat16, torch.float16)
    assert got.item() == (4096.0 if lossy else 4097.0)


@pytest.mark.parametrize("index", [[0, 0], [0, 1]])
def test_an_output_dtype_keeps_what_the_head_would_round(index: list[int]) -> None:
    head = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    payload = torch.ones(2, 1, 2, dtype=torch.bfloat16)
    heads = {0: head, 1: head.clone()}
    plain = project_hidden_states_per_teacher(payload, heads, torch.tensor(index))
    wide = project_hidden_states_per_teacher(
        payload, heads, torch.tensor(index), output_dtype=torch.float32
    )
    assert plain.dtype == torch.bfloat16
    assert plain.flatten().tolist() == [256.0, 256.0]
    assert wide.dtype == torch.float32
    assert wide.flatten().tolist() == [257.0, 257.0]


def test_no_rows_give_no_logits() -> None:
    got = project_hidden_states_per_teacher(HIDDEN[:0], HEADS, INDEX[:0])
    assert got.shape == (0, 6, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_index": INDEX[:2]}, "teacher_index has 2 entries for 3 rows"),
        ({"teacher_index": torch.zeros(4, dtype=torch.int64)}, "4 entries for 3 rows"),
        ({"teacher_index": INDEX.float()}, "teacher_index is torch.float32"),
        ({"teacher_index": INDEX.bool()}, "teacher_index is torch.bool"),
        ({"teacher_index": torch.tensor([7, 5, 3])}, r"row 1 names teacher 5.*loaded: 3, 7"),
        ({"weight_by_index": {}}, "no teacher head is loaded"),
        ({"weight_by_index": {**HEADS, 9: whole(8, 5, 9)}}, "teacher 9 .*width 5.*width is 4"),
        ({"weight_by_index": {**HEADS, 9: whole(4, 8, 9)}}, "teacher 9 .*looks transposed"),
        ({"weight_by_index": {**HEADS, 9: whole(9, 4, 9)}}, "teachers 3 and 9 .* 8 and 9 rows"),
        ({"weight_by_index": {**HEADS, 9: whole(8, 4, 9).float()}}, "float64 and torch.float32"),
        ({"weight_by_index": {3: whole(8, 4, 9)[0]}}, r"teacher 3 has shape \[4\]"),
        ({"weight_by_index": {7: whole(8, 4, 9).to(torch.int8)}}, "int8, which cannot be"),
        ({"payload": HIDDEN[0]}, r"the payload has shape \[6, 4\]"),
        ({"payload": HIDDEN.to(torch.int64)}, "int64, which cannot be multiplied"),
        ({"payload": HIDDEN.to(torch.float8_e4m3fn)}, "float8_e4m3fn, which cannot be"),
    ],
)
def test_a_projection_that_cannot_be_right_is_refused(
    change: dict[str, object], message: str
) -> None:
    good: dict[str, object] = {
        "payload": HIDDEN,
        "weight_by_index": HEADS,
        "teacher_index": INDEX,
    }
    project_hidden_states_per_teacher(**good)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        project_hidden_states_per_teacher(**(good | change))  # type: ignore[arg-type]


def test_heads_that_no_row_uses_are_compared_too() -> None:
    with pytest.raises(ValueError, match="teacher 9"):
        project_hidden_states_per_teacher(
            HIDDEN, {**HEADS, 9: whole(8, 5, 9)}, torch.tensor([3, 3, 3])
        )


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["hidden_states", "logits"])
def test_every_rank_gets_its_window_of_positions_and_columns(
    cp_size: int, tp_size: int, kind: str
) -> None:
    # S 6 in 8 padded slots: the last two are zero on whichever rank owns them.
    full = logits_of(HIDDEN.numpy(), {i: w.numpy() for i, w in HEADS.items()}, [7, 3, 7])
    seen = []
    for tp_rank in range(tp_size):
        width = 8 // tp_size
        rows = slice(tp_rank * width, (tp_rank + 1) * width)
        for cp_rank in range(cp_size):
            got = reconstruct(
                HIDDEN if kind == "hidden_states" else torch.from_numpy(full),
                student=(3, 8 // cp_size, width),
                group=FakeGroup(cp_rank, cp_size) if cp_size > 1 else None,
                rank=tp_rank,
                kind=kind,
                teacher_output_layer_weight_by_index={i: w[rows] for i, w in HEADS.items()},
                teacher_index=INDEX,
            )
            want = shard_of(
                full,
                tp_rank=tp_rank,
                tp_size=tp_size,
                cp_rank=cp_rank,
                cp_size=cp_size,
                padded=8,
            )
            assert np.array_equal(got.numpy(), want)
            assert got.untyped_storage().nbytes() == got.numel() * got.element_size()
            seen.append(want.tobytes())
    assert len(set(seen)) == tp_size * cp_size


def test_the_window_is_cut_before_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[int] = []
    plain = Tensor.__matmul__

    def counted(left: Tensor, right: Tensor) -> Tensor:
        positions.append(left.shape[1])
        return plain(left, right)

    monkeypatch.setattr(Tensor, "__matmul__", counted)
    reconstruct(
        HIDDEN,
        student=(3, 2, 8),
        group=FakeGroup(1, 4),
        teacher_output_layer_weight_by_index=HEADS,
        teacher_index=INDEX,
    )
    assert positions == [2, 2]


def test_a_pack_is_cut_segment_by_segment_and_routed_by_segment() -> None:
    offsets, cp_size = [0, 4, 12, 16], 2
    payload = whole(14, 4, 6)[None]  # two slots short of the pack: they count as zero
    routes = [7, 3, 7]
    for cp_rank in range(cp_size):
        want = []
        for b, route in enumerate(routes):
            for position in owned_positions(offsets[b + 1] - offsets[b], cp_rank, cp_size):
                slot = offsets[b] + position
                row = payload[0, slot].numpy() if slot < 14 else np.zeros(4)
                want.append(HEADS[route].numpy() @ row)
        for given in (offsets, torch.tensor(offsets, dtype=torch.int32)):
            got = reconstruct(
                payload,
                student=(1, 8, 8),
                group=FakeGroup(cp_rank, cp_size),
                teacher_output_layer_weight_by_index=HEADS,
                teacher_index=torch.tensor(routes),
                cu_seqlens_padded=given,
            )
            assert np.array_equal(got[0].numpy(), np.array(want))


def test_a_pack_takes_one_product_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = count_products(
        monkeypatch,
        lambda: reconstruct(
            whole(16, 4, 6)[None],
            student=(1, 16, 8),
            teacher_output_layer_weight_by_index=HEADS,
            teacher_index=torch.tensor([7, 3, 7]),
            cu_seqlens_padded=[0, 4, 12, 16],
        ),
    )
    assert sorted(rows) == [8, 8]


def test_a_pack_of_logits_is_cut_segment_by_segment() -> None:
    payload = torch.arange(16.0).reshape(1, 8, 2)
    got = reconstruct(
        payload,
        student=(1, 4, 1),
        group=FakeGroup(1, 2),
        rank=1,
        kind="logits",
        cu_seqlens_padded=[0, 4, 8],
    )
    # Segments 0..3 and 4..7: rank 1 owns positions 1 and 2 of each, and column 1.
    assert got.flatten().tolist() == [3.0, 5.0, 11.0, 13.0]


def test_logits_that_need_no_cut_may_be_the_payload_itself() -> None:
    payload = torch.randn(2, 3, 4)
    got = reconstruct(payload, student=(2, 3, 4), kind="logits")
    assert got.data_ptr() == payload.data_ptr()


def test_a_cut_of_one_row_and_position_does_not_keep_the_whole_payload_alive() -> None:
    payload = torch.randn(1, 1, 64)
    got = reconstruct(payload, student=(1, 1, 16), rank=2, kind="logits")
    assert torch.equal(got, payload[..., 32:48])
    assert got.untyped_storage().nbytes() == 16 * 4


def test_logits_keep_the_dtype_of_the_payload_unless_another_is_asked_for() -> None:
    payload = torch.randn(1, 2, 4).bfloat16()
    assert reconstruct(payload, student=(1, 2, 2), kind="logits").dtype == torch.bfloat16
    wide = reconstruct(payload, student=(1, 2, 2), kind="logits", output_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, payload[..., :2].float())


def test_one_head_serves_without_an_index_and_obeys_one_that_is_given() -> None:
    one = {3: HEADS[3]}
    got = reconstruct(HIDDEN, student=(3, 6, 8), teacher_output_layer_weight_by_index=one)
    assert torch.equal(got, HIDDEN @ HEADS[3].t())
    with pytest.raises(ValueError, match=r"row 0 names teacher 7.*loaded: 3"):
        reconstruct(
            HIDDEN,
            student=(3, 6, 8),
            teacher_output_layer_weight_by_index=one,
            teacher_index=INDEX,
        )


def heads_and(**more: object) -> dict[str, Any]:
    return {"teacher_output_layer_weight_by_index": HEADS, "teacher_index": INDEX} | more


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "hidden"}, "teacher_payload is 'hidden'"),
        ({"payload": HIDDEN[0]}, r"payload has shape \[6, 4\]"),
        ({"payload": HIDDEN[:2]}, "payload has 2 rows and student_logits 3"),
        ({"student": (3, 5, 8)}, "payload has 6 positions, more than S_local 5 x CP 1"),
        ({"student": (3, 2, 8), "group": FakeGroup(0, 2)}, "S_local 2 x CP 2 = 4"),
        ({"student": (3, 3, 8), "group": FakeGroup(0, 2)}, "3 positions a rank with CP 2"),
        (heads_and(teacher_output_layer_weight_by_index=None), "no teacher head is loaded"),
        (heads_and(teacher_output_layer_weight_by_index={}), "no teacher head is loaded"),
        (heads_and(teacher_index=None), "2 teacher heads are loaded but no teacher_index"),
        (heads_and(teacher_index=INDEX[:1]), "1 entry for 3 rows"),
        (
            heads_and(teacher_index=torch.tensor([7, 5, 3])),
            r"row 1 names teacher 5, whose head is not loaded \(loaded: 3, 7\)",
        ),
        ({"student": (3, 6, 4)}, "project to 8 columns, but .* shard of 4"),
        (
            heads_and(teacher_output_layer_weight_by_index={**HEADS, 9: whole(8, 5, 9)}),
            "teacher 9 .*width 5",
        ),
        (
            heads_and(teacher_output_layer_weight_by_index={**HEADS, 9: whole(7, 4, 9)}),
            "teachers 3 and 9 .* 8 and 7 rows",
        ),
        (
            heads_and(teacher_output_layer_weight_by_index={**HEADS, 9: whole(8, 4, 9).float()}),
            "teachers 3 and 9 .*float64 and torch.float32",
        ),
        ({"cu_seqlens_padded": [0, 6]}, "one packed row, but the payload has 3"),
    ],
)
def test_a_reconstruction_that_cannot_be_right_is_refused(
    change: dict[str, object], message: str
) -> None:
    good: dict[str, object] = heads_and(payload=HIDDEN, student=(3, 6, 8))
    reconstruct(**good)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message) as refusal:
        reconstruct(**(good | change))  # type: ignore[arg-type]
    assert not re.search(r"\n", str(refusal.value))


def test_several_heads_without_an_index_are_refused_though_all_are_the_same() -> None:
    same = {0: HEADS[3], 1: HEADS[3]}
    with pytest.raises(ValueError, match="no teacher_index"):
        reconstruct(HIDDEN, student=(3, 6, 8), teacher_output_layer_weight_by_index=same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": None}, "vocab_parallel_rank is None"),
        ({"rank": -1}, "vocab_parallel_rank is -1"),
        ({"rank": 2}, r"payload has 8 columns, but .*rank 2 is \[8, 12\)"),
        ({"student": (3, 6, 5), "rank": 1}, r"\[5, 10\)"),
        ({"student": (3, 5, 4)}, "more than S_local 5"),
        ({"student": (3, 3, 4), "group": FakeGroup(0, 2)}, "must be even"),
        ({"student": (2, 6, 4)}, "payload has 3 rows and student_logits 2"),
        ({"student": (3, 2, 4), "group": FakeGroup(1, 2)}, "6 positions, more than S_local 2"),
        ({"cu_seqlens_padded": [0, 6]}, "one packed row, but the payload has 3"),
    ],
)
def test_logits_that_cannot_be_cut_are_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"student": (3, 6, 4), "rank": 1, "kind": "logits"}
    payload = torch.randn(3, 6, 8)
    reconstruct(payload, **good)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        reconstruct(payload, **(good | change))  # type: ignore[arg-type]


def test_a_pack_that_does_not_fit_the_student_is_refused() -> None:
    with pytest.raises(InputError, match="ends at 6, but the student has S_local 8"):
        reconstruct(
            HIDDEN[:1],
            student=(1, 8, 8),
            teacher_output_layer_weight_by_index={3: HEADS[3]},
            cu_seqlens_padded=[0, 6],
        )
    with pytest.raises(InputError, match=r"segment|sequence"):
        reconstruct(
            HIDDEN[:1],
            student=(1, 4, 8),
            group=FakeGroup(0, 2),
            teacher_output_layer_weight_by_index={3: HEADS[3]},
            cu_seqlens_padded=[0, 2, 8],
        )
    for tags in ([3], [3, 7, 3]):
        with pytest.raises(ValueError, match=rf"{len(tags)} entr(y|ies) for 2 segments"):
            reconstruct(
                HIDDEN[:1],
                student=(1, 6, 8),
                teacher_output_layer_weight_by_index=HEADS,
                teacher_index=torch.tensor(tags),
                cu_seqlens_padded=[0, 2, 6],
            )
    with pytest.raises(InputError, match="segment 1 names teacher 5"):
        reconstruct(
            HIDDEN[:1],
            student=(1, 6, 8),
            teacher_output_layer_weight_by_index=HEADS,
            teacher_index=torch.tensor([3, 5]),
            cu_seqlens_padded=[0, 2, 6],
        )


def test_the_result_is_where_the_student_is() -> None:
    # The meta device stands for another device: shapes alone travel.
    got = reconstruct_opd_full_teacher_logits(
        torch.randn(2, 4, 8),
        teacher_payload="logits",
        student_logits=torch.empty(2, 2, 4, device="meta"),
        vocab_parallel_rank=1,
        context_parallel_group=FakeGroup(1, 2),
    )
    assert got.device.type == "meta"
    assert got.shape == (2, 2, 4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
@pytest.mark.parametrize("kind", ["hidden_states", "logits"])
def test_payload_and_index_on_the_cpu_meet_a_student_on_the_gpu(kind: str) -> None:
    payload = HIDDEN if kind == "hidden_states" else HIDDEN @ HEADS[3].t()
    got = reconstruct_opd_full_teacher_logits(
        payload,
        teacher_payload=kind,
        student_logits=torch.empty(3, 3 + 1, 8, device="cuda"),
        vocab_parallel_rank=0,
        context_parallel_group=FakeGroup(1, 2),
        teacher_output_layer_weight_by_index={i: w.cuda() for i, w in HEADS.items()},
        teacher_index=INDEX,
    )
    here = reconstruct(payload, student=(3, 4, 8), group=FakeGroup(1, 2), kind=kind, **heads_and())
    assert got.device.type == "cuda"
    assert torch.equal(got.cpu(), here)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["hidden_states", "logits"])
@pytest.mark.parametrize(("cp_rank", "cp_size"), [(0, 1), (0, 2), (1, 2)])
def test_gradients_flow_at_every_context_parallel_size(
    kind: str, cp_rank: int, cp_size: int, packed: bool
) -> None:
    made = torch.Generator().manual_seed(1)
    B, S, H, V = (1, 8, 3, 6) if packed else (2, 7, 3, 6)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=made, requires_grad=True)

    payload = drawn(B, S, H if kind == "hidden_states" else V)
    heads = [drawn(V, H) for _ in "ab"] if kind == "hidden_states" else []

    def run(payload: Tensor, *heads: Tensor) -> Tensor:
        more: dict[str, object] = {"cu_seqlens_padded": [0, 4, 8]} if packed else {}
        if heads:
            more["teacher_output_layer_weight_by_index"] = dict(enumerate(heads))
            more["teacher_index"] = torch.tensor([1, 0])
        return reconstruct(
            payload,
            student=(B, 8 // cp_size, V if heads else V // 2),
            group=FakeGroup(cp_rank, cp_size) if cp_size > 1 else None,
            rank=1,
            kind=kind,
            **more,
        )

    assert run(payload, *heads).abs().sum() > 0
    assert torch.autograd.gradcheck(run, (payload, *heads))


@pytest.mark.parametrize("index", [[3, 3, 3], [7, 3, 7]])
def test_gradients_of_payload_and_heads_are_right(index: list[int]) -> None:
    made = torch.Generator().manual_seed(0)
    payload = torch.randn(3, 6, 4, dtype=torch.float64, generator=made, requires_grad=True)
    heads = [
        torch.randn(5, 4, dtype=torch.float64, generator=made, requires_grad=True) for _ in "ab"
    ]

    def run(payload: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return reconstruct(
            payload,
            student=(3, 4, 5),
            group=FakeGroup(0, 2),
            teacher_output_layer_weight_by_index={3: first, 7: second},
            teacher_index=torch.tensor(index),
        )

    assert torch.autograd.gradcheck(run, (payload, *heads))
    logits = run(payload, *heads)
    logits.sum().backward()  # type: ignore[no-untyped-call]
    # Positions 2..5 belong to rank 1 (its chunks 1 and 2): no gradient reaches them here.
    assert payload.grad is not None
    assert payload.grad[:, :2].abs().sum() > 0
    assert payload.grad[:, 2:].abs().sum() == 0


def test_gradients_flow_through_packs_and_logits() -> None:
    made = torch.Generator().manual_seed(0)
    payload = torch.randn(1, 8, 3, dtype=torch.float64, generator=made, requires_grad=True)
    head = torch.randn(4, 3, dtype=torch.float64, generator=made, requires_grad=True)
    other = torch.randn(4, 3, dtype=torch.float64, generator=made, requires_grad=True)
    logits = torch.randn(2, 6, 8, dtype=torch.float64, generator=made, requires_grad=True)

    def packed(payload: Tensor, head: Tensor, other: Tensor) -> Tensor:
        return reconstruct(
            payload,
            student=(1, 4, 4),
            group=FakeGroup(1, 2),
            teacher_output_layer_weight_by_index={0: head, 1: other},
            teacher_index=torch.tensor([1, 0]),
            cu_seqlens_padded=[0, 4, 8],
        )

    def windowed(logits: Tensor) -> Tensor:
        return reconstruct(logits, student=(2, 4, 4), group=FakeGroup(1, 2), rank=1, kind="logits")

    assert torch.autograd.gradcheck(packed, (payload, head, other))
    assert torch.autograd.gradcheck(windowed, (logits,))


def test_an_rms_norm_worked_by_hand() -> None:
    hidden = torch.tensor([3.0, 4.0, 0.0, 0.0])  # mean square 25 / 4
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    want = torch.tensor([1.2, 3.2, 0.0, 0.0])
    assert torch.allclose(rms_norm(hidden, weight, eps=0.0), want, atol=1e-6)
    assert torch.allclose(rms_norm(hidden, weight - 1, eps=0.0, offset=1.0), want, atol=1e-6)
    damped = rms_norm(hidden, weight, eps=25 / 4 * 3)
    assert torch.allclose(damped, want / 2, atol=1e-6)
    assert rms_norm(hidden.bfloat16(), weight, eps=0.0).dtype == torch.bfloat16


def test_a_norm_is_taken_over_each_vector_of_a_batch() -> None:
    # Mean squares 12.5 and 4: 3 / sqrt(12.5), ...; the weight stored less one is doubled.
    hidden = torch.tensor([[[3.0, 4.0], [2.0, 2.0]]])
    want = torch.tensor([[[3 / 12.5**0.5, 8 / 12.5**0.5], [1.0, 2.0]]])
    got = rms_norm(hidden, torch.tensor([1.0, 2.0]), eps=0.0)
    torch.testing.assert_close(got, want)
    assert torch.equal(rms_norm(hidden, torch.tensor([0.0, 1.0]), eps=0.0, offset=1.0), got)
    tiny = rms_norm(torch.zeros(1, 3, 2), torch.ones(2), eps=1e-6)
    assert tiny.tolist() == [[[0, 0]] * 3]


def test_an_output_dtype_of_the_same_size_is_cast_from_the_product() -> None:
    # 1 + 2^-9 rounds to 1 in bfloat16, the dtype of the product; float16 could hold it.
    payload = torch.tensor([[[1.0, 2**-9]]], dtype=torch.bfloat16)
    heads = {0: torch.ones(1, 2, dtype=torch.bfloat16)}
    index = torch.zeros(1, dtype=torch.int64)
    for dtype, value in ((torch.float16, 1.0), (torch.float32, 1 + 2**-9)):
        logits = project_hidden_states_per_teacher(payload, heads, index, output_dtype=dtype)
        assert logits.dtype == dtype
        assert logits.item() == value


def test_a_pack_of_no_segments_is_empty_however_many_heads_are_loaded() -> None:
    heads = {0: torch.ones(4, 3), 1: torch.ones(4, 3)}
    for loaded in ({0: heads[0]}, heads):
        made = reconstruct_opd_full_teacher_logits(
            torch.ones(1, 0, 3),
            teacher_payload="hidden_states",
            student_logits=torch.zeros(1, 0, 4),
            vocab_parallel_rank=0,
            context_parallel_group=None,
            teacher_output_layer_weight_by_index=loaded,
            teacher_index=torch.zeros(0, dtype=torch.int64),
            cu_seqlens_padded=(0,),
        )
        assert made.shape == (1, 0, 4)
