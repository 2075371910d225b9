"""The canonical names: shapes and dtypes of a file, by a table worked out by hand."""

from __future__ import annotations

import pytest

from opdtool.checks.canonical import Stored, check_canonical

Said = list[tuple[str, str, str | None]]


def said(*tensors: tuple[str, tuple[int, ...], str], where: str = "") -> Said:
    """(code, status, tensor) of every finding."""
    found = check_canonical([Stored(*tensor) for tensor in tensors], where)
    return [(finding.code, finding.status, finding.tensor) for finding in found]


def words(*tensors: tuple[str, tuple[int, ...], str]) -> list[str]:
    found = check_canonical([Stored(*tensor) for tensor in tensors])
    return [finding.message for finding in found if finding.status != "pass"]


IDS = ("input_ids", (4, 9), "I64")
OFFSETS = ("cu_seqlens_padded", (5,), "I32")


def test_a_file_of_other_names_is_not_spoken_of() -> None:
    assert said(("weights", (3,), "F32")) == []


@pytest.mark.parametrize(
    "tensor",
    [
        *[("input_ids", (4, 9), dtype) for dtype in ("I8", "I32", "U16", "U64")],
        ("input_lengths", (4,), "I64"),
        *[("token_mask", (4, 9), dtype) for dtype in ("F32", "BF16", "BOOL", "F8_E4M3")],
        ("sample_mask", (4,), "F16"),
        ("cu_seqlens", (5,), "I32"),
        ("position_ids", (1, 36), "I64"),
        ("target_ids", (1, 36), "I32"),
        ("draft_token_mask", (1, 36), "F64"),
        ("sequence_index", (4,), "I64"),
        ("teacher_full_hidden_states", (4, 9, 3), "BF16"),
        ("teacher_full_logits", (4, 9, 7), "F32"),
        ("opd_full_teacher_index", (4,), "U8"),
        ("lm_head.weight", (7, 3), "F16"),
        ("student_logits", (4, 5, 7), "F32"),
        ("d2t", (3,), "I64"),
        ("t2d", (7,), "BOOL"),
    ],
)
def test_what_a_name_promises_passes(tensor: tuple[str, tuple[int, ...], str]) -> None:
    assert said(tensor) == [("OPD941", "pass", None), ("OPD942", "pass", None)]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("input_ids", (36,), "I64"), "has shape [36]; expected [B, S]"),
        (("input_ids", (4, 9, 1), "I64"), "has shape [4, 9, 1]; expected [B, S]"),
        (("input_lengths", (4, 1), "I64"), "has shape [4, 1]; expected [B]"),
        (("position_ids", (36,), "I64"), "has shape [36]; expected [1, T]"),
        (
            ("teacher_full_logits", (4, 9), "F32"),
            "has shape [4, 9]; expected [B, S, V] or [1, T, V]",
        ),
        (("teacher_logits", (4, 7), "F32"), "has shape [4, 7]; expected [B, S_local, V]"),
        (("lm_head.weight", (7,), "F32"), "has shape [7]; expected [V, H]"),
    ],
)
def test_a_shape_that_a_name_does_not_have_fails(
    tensor: tuple[str, tuple[int, ...], str], message: str
) -> None:
    assert said(tensor)[0] == ("OPD941", "fail", tensor[0])
    assert words(tensor) == [message]


def test_in_a_pack_token_aligned_tensors_lie_in_slots() -> None:
    packed = ("input_ids", (1, 36), "I64")
    assert said(OFFSETS, packed)[0][1] == "pass"
    assert words(OFFSETS, ("input_ids", (4, 9), "I64")) == ["has shape [4, 9]; expected [1, T]"]
    assert words(OFFSETS, ("teacher_full_logits", (4, 9, 7), "F32")) == [
        "has shape [4, 9, 7]; expected [1, T, V]"
    ]
    assert words(OFFSETS, packed, ("target_ids", (1, 40), "I64")) == [
        "has shape [1, 40], so T is 40, but by input_ids it is 36"
    ]


def test_shapes_that_some_frameworks_keep_warn() -> None:
    mask = "draft_token_mask"
    for shape in ((36,), (36, 1), (4, 9)):
        assert said((mask, shape, "F32"))[0] == ("OPD941", "warn", mask)
        assert words((mask, shape, "F32")) == [f"has shape {list(shape)}; expected [1, T]"]
    assert said(OFFSETS, (mask, (4, 9), "F32"))[0] == ("OPD941", "fail", mask)
    assert said(OFFSETS, (mask, (36,), "F32"))[0] == ("OPD941", "warn", mask)
    assert said(("target_ids", (4, 9), "I64"))[0] == ("OPD941", "warn", "target_ids")


def test_b_and_s_are_one_size_in_a_file_and_other_letters_any() -> None:
    assert words(IDS, ("input_lengths", (5,), "I64")) == [
        "has shape [5], so B is 5, but by input_ids it is 4"
    ]
    assert words(IDS, ("token_mask", (4, 8), "F32")) == [
        "has shape [4, 8], so S is 8, but by input_ids it is 9"
    ]
    # Both differ: one is enough to say.
    assert words(IDS, ("token_mask", (5, 8), "F32")) == [
        "has shape [5, 8], so B is 5, but by input_ids it is 4"
    ]
    assert words(IDS, ("lm_head.weight", (7, 3), "F32"), ("t2d", (8,), "BOOL")) == []
    assert words(("cu_seqlens", (5,), "I32"), ("sequence_index", (4,), "I64")) == []


def test_a_shape_that_fits_two_forms_binds_nothing() -> None:
    # One row of 9, or a pack of 9 slots: either way the lengths of 4 rows are not contradicted.
    both = ("teacher_full_logits", (1, 9, 7), "F32")
    assert words(both, ("input_lengths", (4,), "I64")) == []
    assert words(both, ("input_ids", (4, 8), "I64")) == []


@pytest.mark.parametrize(
    ("tensor", "status", "message"),
    [
        (("input_ids", (4, 9), "F32"), "fail", "has dtype F32; expected an integer dtype"),
        (("input_ids", (4, 9), "BOOL"), "fail", "has dtype BOOL; expected an integer dtype"),
        (("token_mask", (4, 9), "I64"), "warn", "has dtype I64; expected a float dtype or bool"),
        (("token_mask", (4, 9), "C64"), "fail", "has dtype C64; expected a float dtype or bool"),
        (("cu_seqlens", (5,), "I64"), "warn", "has dtype I64; expected I32"),
        (("cu_seqlens", (5,), "F32"), "fail", "has dtype F32; expected I32"),
        (("d2t", (3,), "I32"), "warn", "has dtype I32; expected I64"),
        (("t2d", (7,), "I64"), "fail", "has dtype I64; expected bool"),
        (("lm_head.weight", (7, 3), "I8"), "fail", "has dtype I8; expected a float dtype"),
    ],
)
def test_a_dtype_that_can_be_read_warns_and_another_fails(
    tensor: tuple[str, tuple[int, ...], str], status: str, message: str
) -> None:
    assert ("OPD942", status, tensor[0]) in said(tensor)
    assert words(tensor) == [message]


def test_what_is_wrong_or_right_keeps_nothing_behind_it_from_being_looked_at() -> None:
    bad = ("input_ids", (36,), "I64")
    two_forms = ("teacher_full_logits", (1, 9, 7), "F32")
    for first in (bad, two_forms, ("t2d", (7,), "BOOL")):
        found = said(first, ("input_lengths", (5, 1), "F32"))
        assert ("OPD941", "fail", "input_lengths") in found
        assert ("OPD942", "fail", "input_lengths") in found
    # The second of two files' sizes is still held to the first.
    lengths, mask = ("input_lengths", (5,), "I64"), ("sample_mask", (4,), "F32")
    assert ("OPD941", "fail", "sample_mask") in said(bad, two_forms, lengths, mask)


def test_each_code_speaks_of_what_is_wrong_first_and_then_of_the_rest_by_file() -> None:
    found = list(
        check_canonical(
            [Stored("input_ids", (4, 9), "F32"), Stored("input_lengths", (5,), "I64")], "a: "
        )
    )
    assert [(f.code, f.status, f.tensor) for f in found] == [
        ("OPD941", "fail", "a: input_lengths"),
        ("OPD941", "pass", "a: "),
        ("OPD942", "fail", "a: input_ids"),
        ("OPD942", "pass", "a: "),
    ]
    assert found[1].message == "as the names promise: input_ids"
    assert found[3].message == "as the names promise: input_lengths"
    alone = said(("input_ids", (36,), "F32"))
    assert alone == [("OPD941", "fail", "input_ids"), ("OPD942", "fail", "input_ids")]
