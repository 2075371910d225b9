"""The reference's names and signatures: one import can stand for the other."""

from __future__ import annotations

import inspect

import pytest

from opdtool import loss_utils

SIGNATURES = {
    "rescale_loss_metrics": ["metrics", "normalizers", "*token_factor", "*sequence_factor"],
    "map_teacher_logits_to_draft_vocab": [
        "teacher_logits",
        "d2t",
        "vocab_parallel_rank=None",
        "vocab_parallel_group=None",
    ],
    "roll_packed_seq_dim": ["tensor", "cu_seqlens_padded", "seq_dim"],
    "pack_rolled_draft_token_mask": [
        "token_mask",
        "sample_mask",
        "cu_seqlens",
        "cu_seqlens_padded",
    ],
    "_project_hidden_states_per_teacher": [
        "payload",
        "weight_by_index",
        "teacher_index",
        "output_dtype=None",
    ],
    "reconstruct_opd_full_teacher_logits": [
        "payload",
        "*teacher_payload",
        "*student_logits",
        "*vocab_parallel_rank",
        "*context_parallel_group",
        "*teacher_output_layer_weight_by_index=None",
        "*teacher_index=None",
        "*cu_seqlens_padded=None",
        "*output_dtype=None",
    ],
    "_pack_input_ids": [
        "input_ids",
        "cu_seqlens_q",
        "cu_seqlens_q_padded",
        "cp_rank=0",
        "cp_size=1",
        "roll_shift=0",
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_each_function_has_the_reference_s_signature(name: str) -> None:
    found = [
        ("*" if parameter.kind is parameter.KEYWORD_ONLY else "")
        + parameter.name
        + ("" if parameter.default is parameter.empty else f"={parameter.default}")
        for parameter in inspect.signature(getattr(loss_utils, name)).parameters.values()
    ]
    assert found == SIGNATURES[name]


def test_nothing_else_is_exported() -> None:
    assert set(loss_utils.__all__) == {*SIGNATURES, "MetricNormalizer"}
