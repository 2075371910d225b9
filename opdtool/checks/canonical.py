"""The canonical names (contract 2): which shape and dtype a tensor of each name has.

Nothing is read: the table is asked with names, shapes and dtypes. A dimension is a letter;
the letters B, S and T stand for one size in a whole file, the others for any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from opdtool.checks.registry import check_name
from opdtool.findings import Finding

Kind = Literal["int", "float", "bool", "mask"]

INTS = frozenset({"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})
FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
KINDS: dict[Kind, frozenset[str]] = {
    "int": INTS,
    "float": FLOATS,
    "bool": frozenset({"BOOL"}),
    "mask": FLOATS | {"BOOL"},
}
WORDS: dict[Kind, str] = {
    "int": "an integer dtype",
    "float": "a float dtype",
    "bool": "bool",
    "mask": "a float dtype or bool",
}
BOUND = frozenset("BST")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file describes it. ``dtype`` is safetensors' word, such as ``BF16``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Canonical:
    """What a name promises: shapes in a padded batch, shapes in a pack, and the dtype."""

    padded: tuple[str, ...]
    packed: tuple[str, ...]
    kind: Kind


_TOKENS = ("BS",), ("1T",)
_ROWS = ("B",), ("N",)
_MASK = ("1T", "T", "T1", "BS"), ("1T", "T", "T1")

TABLE: dict[str, Canonical] = {
    "input_ids": Canonical(*_TOKENS, "int"),
    "input_lengths": Canonical(*_ROWS, "int"),
    "token_mask": Canonical(*_TOKENS, "mask"),
    "sample_mask": Canonical(*_ROWS, "mask"),
    "cu_seqlens": Canonical(("N",), ("N",), "int"),
    "cu_seqlens_padded": Canonical(("N",), ("N",), "int"),
    "position_ids": Canonical(("1T", "BS"), ("1T",), "int"),
    "target_ids": Canonical(("1T", "BS"), ("1T",), "int"),
    "draft_token_mask": Canonical(*_MASK, "mask"),
    "sequence_index": Canonical(("N",), ("N",), "int"),
    "teacher_full_hidden_states": Canonical(("BSH", "1TH"), ("1TH",), "float"),
    "teacher_full_logits": Canonical(("BSV", "1TV"), ("1TV",), "float"),
    "opd_full_teacher_index": Canonical(("N",), ("N",), "int"),
    "lm_head.weight": Canonical(("VH",), ("VH",), "float"),
    # One rank's shard of the sequence, so its width is not S.
    "student_logits": Canonical(("BLV",), ("1LV",), "float"),
    "teacher_logits": Canonical(("BLV",), ("1LV",), "float"),
    "d2t": Canonical(("D",), ("D",), "int"),
    "t2d": Canonical(("V",), ("V",), "bool"),
}


def check_canonical(tensors: Iterable[Stored], where: str = "") -> Iterator[Finding]:
    """Findings ``canonical-shape`` and ``canonical-dtype`` for the tensors of one file.

    ``where`` (a file's name) goes before the tensor's name. Yields nothing when no tensor
    has a canonical name.
    """
    known = [tensor for tensor in tensors if tensor.name in TABLE]
    if not known:
        return
    packed = any(tensor.name == "cu_seqlens_padded" for tensor in known)
    shapes = list(_shapes(known, packed, where))
    dtypes = list(_dtypes(known, where))
    names = ", ".join(tensor.name for tensor in known)
    for code, found in (("OPD941", shapes), ("OPD942", dtypes)):
        yield from found
        if not any(finding.status == "fail" for finding in found):
            yield _finding(code, "pass", f"as the names promise: {names}", where or None)


def _shapes(known: list[Stored], packed: bool, where: str) -> Iterator[Finding]:
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in known:
        canonical = TABLE[tensor.name]
        forms = canonical.packed if packed else canonical.padded
        fitting = [form for form in forms if _fits(form, tensor.shape)]
        if not fitting:
            yield _finding(
                "OPD941",
                "fail",
                f"has shape {list(tensor.shape)}; expected {' or '.join(map(_shown, forms))}",
                where + tensor.name,
            )
            continue
        # A shape that two forms fit, such as [1, T] and [B, S] for one row, binds nothing.
        if len(fitting) > 1:
            continue
        for letter, size in zip(fitting[0], tensor.shape, strict=True):
            known_size, by = sizes.setdefault(letter, (size, tensor.name))
            if letter in BOUND and known_size != size:
                message = (
                    f"has shape {list(tensor.shape)}, so {letter} is {size}, but by {by} it is "
                    f"{known_size}"
                )
                yield _finding("OPD941", "fail", message, where + tensor.name)
                break


def _fits(form: str, shape: tuple[int, ...]) -> bool:
    return len(form) == len(shape) and all(
        letter != "1" or size == 1 for letter, size in zip(form, shape, strict=True)
    )


def _shown(form: str) -> str:
    names = {"L": "S_local", "N": "N"}
    return f"[{', '.join(names.get(letter, letter) for letter in form)}]"


def _dtypes(known: list[Stored], where: str) -> Iterator[Finding]:
    for tensor in known:
        kind = TABLE[tensor.name].kind
        if tensor.dtype in KINDS[kind]:
            continue
        # Integer masks of zeros and ones are common and read without loss.
        status: Literal["warn", "fail"] = (
            "warn" if kind == "mask" and tensor.dtype in INTS else "fail"
        )
        yield _finding(
            "OPD942",
            status,
            f"has dtype {tensor.dtype}; expected {WORDS[kind]}",
            where + tensor.name,
        )


def _finding(
    code: str, status: Literal["pass", "warn", "fail"], message: str, tensor: str | None
) -> Finding:
    return Finding(code=code, name=check_name(code), status=status, message=message, tensor=tensor)
