"""Lengths, indices and shards that cannot be meant: refused by name, never taken as others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opdtool.core.binning import pack_bins
from opdtool.core.divergence import DivergenceSums, chunked_divergences
from opdtool.core.errors import InputError
from opdtool.core.geometry import PackGeometry
from opdtool.core.layout import PackedLayout
from opdtool.core.masks import pack_rolled_draft_token_mask
from opdtool.core.offsets import as_offsets
from opdtool.core.packing import gather_cp, pack_input_ids, roll_packed_seq_dim, unpack
from opdtool.core.plan import BinOptions, plan_packs
from opdtool.core.teacher import (
    project_hidden_states_per_teacher,
    reconstruct_opd_full_teacher_logits,
)
from opdtool.core.vocab import (
    choose_draft_vocab,
    coverage,
    map_teacher_logits_to_draft_vocab,
    t2d_from_ids,
)

IDS = torch.tensor([[11, 12, 13], [21, 22, 23]])
GOOD = (0, 3, 5)
PADDED = (0, 4, 8)

NO_INTEGERS: list[tuple[Any, str]] = [
    ((0.0, 3.5, 5.0), "float"),
    ((0, 3, 5.0), "float"),
    ((False, True, True), "bool"),
    ((0, True, 5), "bool"),
    ((0, 3, 5j), "complex"),
    (("0", "3", "5"), "str"),
    ((0, None, 5), "NoneType"),
    (np.array([0.0, 3.0, 5.0]), "float64"),
    (np.array([False, True, True]), "bool"),
    (torch.tensor([0.0, 3.9, 5.0]), "torch.float32"),
    (torch.tensor([0, 1, 1]).bool(), "torch.bool"),
    (torch.tensor([0, 3, 5]).to(torch.complex64), "torch.complex64"),
]
TOO_LARGE: list[Any] = [
    (0, 3, 2**70),
    (0, 3, 2**63),
    (0, -(2**70), 5),
    np.array([0, 3, 2**63], dtype=np.uint64),
    torch.tensor(np.array([0, 3, 2**64 - 1], dtype=np.uint64)),
]


@pytest.mark.parametrize(("values", "dtype"), NO_INTEGERS, ids=str)
def test_offsets_that_are_no_integers_are_refused_with_their_name_and_dtype(
    values: Any, dtype: str
) -> None:
    with pytest.raises(InputError, match=f"cu_seqlens_x holds {dtype}; expected integers"):
        as_offsets(values, "cu_seqlens_x")


@pytest.mark.parametrize("values", TOO_LARGE, ids=str)
def test_offsets_past_int64_are_refused_by_entry(values: Any) -> None:
    with pytest.raises(InputError, match=r"cu_seqlens_x holds \S+ at entry \d, past int64"):
        as_offsets(values, "cu_seqlens_x")


@pytest.mark.parametrize("values", [[[0], [1, 2]], 5, torch.tensor(3), [[0, 1], [2, 3]]], ids=str)
def test_what_is_no_vector_is_refused(values: Any) -> None:
    with pytest.raises(InputError, match=r"cu_seqlens_x .*expected \[N\+1\]|cu_seqlens_x .*vector"):
        as_offsets(values, "cu_seqlens_x")


def test_the_greatest_integers_of_every_dtype_are_kept_and_nothing_is_an_empty_vector() -> None:
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64):
        top = int(np.iinfo(dtype).max)
        assert as_offsets(np.array([0, top], dtype=dtype)).tolist() == [0, top]
        assert as_offsets(torch.from_numpy(np.array([0, top], dtype=dtype))).tolist() == [0, top]
    assert as_offsets((0, 2**63 - 1)).tolist() == [0, 2**63 - 1]
    assert as_offsets(np.array([2**63 - 1], dtype=np.uint64)).tolist() == [2**63 - 1]
    mixed: list[Any] = [[np.int32(0), np.uint16(7)], [torch.tensor(0), torch.tensor(7)]]
    for values in mixed:
        assert as_offsets(values).tolist() == [0, 7]
    empty = as_offsets(())
    assert (empty.shape, empty.dtype) == ((0,), np.dtype(np.int64))


BAD: list[tuple[Any, str]] = [
    ((0.0, 4.0, 8.0), "holds float"),
    ((1, 4, 8), "starts at 1"),
    ((0, 8, 4), "falls from 8 to 4"),
    (((0, 4, 8),), "has shape"),
]


@pytest.mark.parametrize(("bad", "says"), BAD, ids=str)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda bad: pack_input_ids(IDS, bad, PADDED), "cu_seqlens"),
        (lambda bad: pack_input_ids(IDS, GOOD, bad), "cu_seqlens_padded"),
        (lambda bad: roll_packed_seq_dim(torch.ones(8), bad, 0), "cu_seqlens_padded"),
        (
            lambda bad: pack_rolled_draft_token_mask(IDS, torch.ones(2), bad, PADDED),
            "cu_seqlens",
        ),
        (
            lambda bad: pack_rolled_draft_token_mask(IDS, torch.ones(2), GOOD, bad),
            "cu_seqlens_padded",
        ),
        (lambda bad: PackedLayout.from_cu_seqlens(bad, PADDED), "cu_seqlens"),
        (lambda bad: PackedLayout.from_cu_seqlens(GOOD, bad), "cu_seqlens_padded"),
    ],
)
def test_of_two_vectors_the_wrong_one_is_named(
    call: Callable[[Any], Any], name: str, bad: Any, says: str
) -> None:
    with pytest.raises(InputError, match=rf"^{name}(_q|_q_padded)? {says}"):
        call(bad)


def test_more_rows_than_segments_are_refused() -> None:
    with pytest.raises(InputError, match=r"1 sequence.* but the batch has 2 rows"):
        pack_input_ids(IDS, (0, 3), (0, 4))


def test_a_segment_past_the_rows_must_be_cut_evenly_too() -> None:
    """It holds no token, yet its slots are part of what every rank holds: of 4 + 2 slots each
    of two ranks would get 3, of which one belonged to no chunk."""
    assert pack_input_ids(IDS[:1], (0, 3, 3), (0, 4, 8), 1, 2).tolist() == [[12, 13, 0, 0]]
    with pytest.raises(InputError, match=r"sequence 1 has a padded length of 2, .* multiple of 4"):
        pack_input_ids(IDS[:1], (0, 3, 3), (0, 4, 6), 1, 2)


@pytest.mark.parametrize("length", [7, 9])
def test_a_tensor_that_ends_before_or_behind_its_offsets_is_not_rolled(length: int) -> None:
    with pytest.raises(InputError, match=f"has {length} slots but cu_seqlens_padded ends at 8"):
        roll_packed_seq_dim(torch.ones(1, length), PADDED, 1)


@pytest.mark.parametrize("index", [(1, 1), (0, 0)])
@pytest.mark.parametrize("real", [GOOD, (0, 3, 3)], ids=["tokens", "no tokens"])
def test_a_row_that_two_segments_claim_is_named(
    index: tuple[int, int], real: tuple[int, ...]
) -> None:
    layout = PackedLayout.from_cu_seqlens(real, PADDED, sequence_index=index)
    with pytest.raises(InputError, match=f"sequence_index names row {index[0]} twice"):
        unpack(torch.ones(8), layout, rows=2, width=3)


def test_a_sequence_index_of_floats_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^sequence_index holds float"):
        PackedLayout.from_cu_seqlens(GOOD, PADDED, sequence_index=(0.0, 1.0))  # type: ignore[arg-type]


TWO = PackedLayout.from_cu_seqlens(GOOD, PADDED, cp_size=2)


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        (
            [torch.ones(4), torch.ones(4, dtype=torch.float64)],
            "cp_rank 1 is torch.float64 .*cp_rank 0 is torch.float32",
        ),
        ([torch.ones(4).bool(), torch.ones(4).byte()], "cp_rank 1 is torch.uint8"),
        ([torch.ones(4, 2), torch.ones(4, 3)], r"cp_rank 1 .*\[4, 3\].*cp_rank 0 .*\[4, 2\]"),
        ([torch.ones(4, 2), torch.ones(4, 1)], r"cp_rank 1 .*\[4, 1\]"),
        ([torch.ones(4, 1), torch.ones(4)], r"cp_rank 1 .*\[4\]"),
        ([torch.ones(4), torch.ones(4, device="meta")], "cp_rank 1 .* on meta"),
        ([torch.ones(()), torch.ones(4)], r"cp_rank 0 has shape \[\]"),
        ([torch.ones(4), torch.ones(())], r"cp_rank 1 has shape \[\]"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(
    shards: list[torch.Tensor], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        gather_cp(shards, TWO)


def test_shards_of_which_some_want_a_gradient_are_gathered_with_it() -> None:
    for wants in ((True, False), (False, True), (True, True)):
        shards = [torch.tensor([1.0, 2, 3, 4]) + 10 * rank for rank in range(2)]
        for shard, want in zip(shards, wants, strict=True):
            shard.requires_grad_(want)
        whole = gather_cp(shards, TWO)
        assert whole.tolist() == [1, 11, 12, 2, 3, 13, 14, 4]
        whole.backward(torch.arange(8.0))  # type: ignore[no-untyped-call]
        grads = [shard.grad.tolist() if shard.grad is not None else None for shard in shards]
        assert grads == [
            [0, 3, 4, 7] if wants[0] else None,
            [1, 2, 5, 6] if wants[1] else None,
        ]


@pytest.mark.parametrize("drop_empty", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 16])
def test_a_negative_length_is_no_empty_row(drop_empty: bool, max_tokens: int | None) -> None:
    options = BinOptions(max_tokens=max_tokens)
    with pytest.raises(InputError, match=r"rows 1, 3 .*length -2.* below 0"):
        plan_packs(np.array([3, -2, 4, -1]), PackGeometry(), options, drop_empty=drop_empty)


def test_lengths_that_are_no_integers_are_refused_by_name() -> None:
    lengths: Any = np.array([3.0, 2.5])
    with pytest.raises(InputError, match=r"^lengths holds float64"):
        plan_packs(lengths, PackGeometry(), BinOptions())
    with pytest.raises(InputError, match=r"^lengths holds float64"):
        PackGeometry().layout(lengths)
    with pytest.raises(InputError, match=r"^lengths holds float64"):
        pack_bins(lengths, 8)
    with pytest.raises(InputError, match="length 1 is -2, below 0"):
        PackGeometry().layout((3, -2))
    with pytest.raises(InputError, match=r"lengths has shape \[2, 1\]"):
        plan_packs(np.array([[3], [2]]), PackGeometry(), BinOptions())


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_a_limit_below_one_slot_is_refused(max_tokens: int) -> None:
    options = BinOptions(max_tokens=max_tokens)
    with pytest.raises(InputError, match=f"--max-tokens {max_tokens} is less than 4"):
        plan_packs(np.array([3]), PackGeometry(cp_size=2), options)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1; it must be at least 0"):
        pack_bins(np.array([3, 2]), 8, algorithm="ffs", seed=-1)


COUNTS = torch.tensor([3, 0, 5, 1])


@pytest.mark.parametrize("ids", [[0, -1], [-4, 0], [1, 4], [2**40, 0]], ids=str)
def test_ids_outside_the_vocabulary_are_refused_and_not_counted_from_its_end(
    ids: list[int],
) -> None:
    stray = next(i for i, value in enumerate(ids) if not 0 <= value < 4)
    says = rf"ids\[{stray}\] is {ids[stray]}, outside the vocabulary 0\.\.3"
    with pytest.raises(InputError, match=says):
        t2d_from_ids(torch.tensor(ids), 4)
    with pytest.raises(InputError, match=says):
        coverage(COUNTS, torch.tensor(ids))


def test_ids_of_every_integer_dtype_are_marked_and_others_are_refused() -> None:
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int64):
        ids = torch.tensor([2, 0]).to(dtype)
        assert t2d_from_ids(ids, 4).tolist() == [True, False, True, False]
    assert t2d_from_ids(torch.tensor([], dtype=torch.int64), 2).tolist() == [False, False]
    for wrong in (torch.tensor([1.0]), torch.tensor([True])):
        with pytest.raises(InputError, match=rf"ids holds {wrong.dtype}; expected integers"):
            t2d_from_ids(wrong, 4)
    with pytest.raises(InputError, match="a vocabulary of -1 ids"):
        t2d_from_ids(torch.tensor([0]), -1)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (torch.tensor([1.0, float("nan"), 2.0, 0.0]), r"counts\[1\] is nan"),
        (torch.tensor([1.0, 2.0, float("inf"), 0.0]), r"counts\[2\] is inf"),
        (torch.tensor([1.0, -0.5, 2.0, 0.0]), r"counts\[1\] is -0.5"),
        (torch.tensor([1, 2, 3, -4]), r"counts\[3\] is -4"),
        (torch.tensor(np.array([0, 2**64 - 1], dtype=np.uint64)), rf"counts\[1\] is {2**64 - 1}"),
        (torch.tensor([True, False, True, True]), r"counts is torch\.bool"),
        (torch.zeros(4, dtype=torch.complex64), r"counts is torch\.complex64"),
        (torch.zeros(2, 2), r"counts has shape \[2, 2\]"),
        (torch.tensor(3), r"counts has shape \[\]"),
    ],
)
def test_counts_that_count_nothing_are_refused_by_id(counts: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        choose_draft_vocab(counts, 1)
    with pytest.raises(InputError, match=says):
        coverage(counts, torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float16])
def test_counts_of_any_number_dtype_are_chosen_from(dtype: torch.dtype) -> None:
    counts = COUNTS.to(dtype)
    assert choose_draft_vocab(counts, 2).tolist() == [0, 2]
    assert coverage(counts, torch.tensor([0, 2])) == 8 / 9


@pytest.mark.parametrize(("required", "says"), [([1.0], "float"), ([True], "bool"), (["1"], "str")])
def test_required_ids_that_are_no_integers_are_refused(required: list[Any], says: str) -> None:
    with pytest.raises(InputError, match=f"must_include holds {says}"):
        choose_draft_vocab(COUNTS, 2, required)


def of_a_teacher(**more: Any) -> torch.Tensor:
    """A reconstruction that is right but for ``more``."""
    asked: dict[str, Any] = {
        "payload": torch.ones(1, 8, 3),
        "teacher_payload": "hidden_states",
        "student_logits": torch.empty(1, 8, 2),
        "vocab_parallel_rank": 0,
        "context_parallel_group": None,
        "teacher_output_layer_weight_by_index": {0: torch.ones(2, 3), 1: torch.ones(2, 3)},
        "cu_seqlens_padded": (0, 4, 6, 8),
        "teacher_index": torch.tensor([0, 1, 1]),
    }
    return reconstruct_opd_full_teacher_logits(**asked | more)


NO_PRODUCTS = [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, "float32"]


@pytest.mark.parametrize("dtype", NO_PRODUCTS, ids=str)
def test_an_output_dtype_that_no_product_is_in_is_refused(dtype: Any) -> None:
    with pytest.raises(InputError, match=f"output_dtype is {dtype}; expected one that a product"):
        of_a_teacher(output_dtype=dtype)
    with pytest.raises(InputError, match=f"output_dtype is {dtype}; expected one that a product"):
        of_a_teacher(teacher_payload="logits", output_dtype=dtype)
    with pytest.raises(InputError, match=f"output_dtype is {dtype}; expected one that a product"):
        project_hidden_states_per_teacher(
            torch.ones(1, 2, 3), {0: torch.ones(2, 3)}, torch.tensor([0]), dtype
        )


def test_a_tail_segment_has_a_teacher_too_and_the_refusal_says_so() -> None:
    assert of_a_teacher().shape == (1, 8, 2)
    says = "teacher_index has 2 entries for 3 segments .* one entry a segment, a tail segment incl"
    with pytest.raises(InputError, match=says):
        of_a_teacher(teacher_index=torch.tensor([0, 1]))
    with pytest.raises(InputError, match="segment 2 names teacher 9, whose head is not loaded"):
        of_a_teacher(teacher_index=torch.tensor([0, 1, 9]))


@pytest.mark.parametrize(("bad", "says"), BAD, ids=str)
def test_wrong_offsets_of_a_teacher_s_pack_are_named_as_they_are_called(
    bad: Any, says: str
) -> None:
    with pytest.raises(InputError, match=f"^cu_seqlens_padded {says}"):
        of_a_teacher(cu_seqlens_padded=bad)


def test_a_process_outside_its_group_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: -1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(InputError, match=r"not in context_parallel_group: .* -1 of 2"):
        of_a_teacher(context_parallel_group=object())
    with pytest.raises(InputError, match="this process is not in vocab_parallel_group"):
        map_teacher_logits_to_draft_vocab(torch.ones(1, 4), torch.tensor([0, 0]), None, object())
    with pytest.raises(InputError, match="this process is not in vocab_parallel_group"):
        chunked_divergences(torch.ones(1, 4), torch.ones(1, 4), vocab_parallel_group=object())


def test_a_group_that_cannot_be_asked_is_refused_by_name() -> None:
    says = r"context_parallel_group is a object that cannot be asked for its rank \("
    with pytest.raises(InputError, match=says):
        of_a_teacher(context_parallel_group=object())


def test_context_parallel_ranks_are_asked_through_torch_distributed_at_call_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign = object()
    payload = torch.arange(8.0)[None, :, None]
    for rank, want in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        place = {"get_rank": rank, "get_world_size": 2}
        for name, value in place.items():
            answer = {foreign: value}.__getitem__
            monkeypatch.setattr(torch.distributed, name, answer)
        found = of_a_teacher(
            payload=payload,
            teacher_payload="logits",
            student_logits=torch.empty(1, 4, 1),
            context_parallel_group=foreign,
            cu_seqlens_padded=None,
            teacher_index=None,
        )
        assert found.flatten().tolist() == want


@pytest.mark.parametrize("columns", [0, -1, -8192])
def test_a_slice_of_no_columns_is_refused(columns: int) -> None:
    with pytest.raises(InputError, match=f"vocab_slice is {columns}; it must be at least 1"):
        chunked_divergences(torch.ones(1, 4), torch.ones(1, 4), vocab_slice=columns)


@pytest.mark.parametrize("shape", [(), (3, 0)], ids=str)
def test_logits_without_columns_have_no_divergence(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"have shape \[.*\]; expected \[\.\.\., V\] with columns"):
        chunked_divergences(torch.ones(shape), torch.ones(shape))


@pytest.mark.parametrize(
    ("at", "student"),
    [
        (slice(0, 2), (3, 4)),  # too few positions
        (slice(2, 9), (3, 4)),  # past the last one
        (slice(0, 6, 2), (3, 4)),  # every second
        (slice(0, 3), (1, 4)),  # a row that would be taken for all
        (slice(0, 3), (3, 5)),
    ],
)
def test_tiles_that_are_not_of_their_positions_are_refused(
    at: slice, student: tuple[int, int]
) -> None:
    sums = DivergenceSums(4)
    with pytest.raises(InputError, match=r"tiles of shapes \[3, 4\] and"):
        sums.add(at, torch.ones(3, 4), torch.ones(student))
    sums.add(slice(1, 4), torch.ones(3, 4), torch.ones(3, 4))
    assert sums.teacher.mass.tolist() == [0, 4, 4, 4]
