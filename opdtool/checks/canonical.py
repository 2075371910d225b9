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
    """What a name promises: shapes in a padded batch, shapes in a pack, and the dtype.

    ``exact`` is the one dtype of it; others of its kind are read, with a warning. So are the
    shapes of ``also``, in which some frameworks keep what here is packed.
    """

    padded: tuple[str, ...]
    packed: tuple[str, ...]
    kind: Kind
    exact: str | None = None
    also: tuple[str, ...] = ()


_TOKENS = ("BS",), ("1T",)
_ROWS = ("B",), ("N",)
_PACKED = ("1T",), ("1T",)
_ANY = ("N",), ("N",)

TABLE: dict[str, Canonical] = {
    "input_ids": Canonical(*_TOKENS, "int"),
    "input_lengths": Canonical(*_ROWS, "int"),
    "token_mask": Canonical(*_TOKENS, "mask"),
    "sample_mask": Canonical(*_ROWS, "mask"),
    "cu_seqlens": Canonical(*_ANY, "int", "I32"),
    "cu_seqlens_padded": Canonical(*_ANY, "int", "I32"),
    "position_ids": Canonical(*_PACKED, "int", also=("BS",)),
    "target_ids": Canonical(*_PACKED, "int", also=("BS",)),
    "draft_token_mask": Canonical(*_PACKED, "mask", also=("T", "T1", "BS")),
    "sequence_index": Canonical(*_ANY, "int", "I64"),
    "teacher_full_hidden_states": Canonical(("BSH", "1TH"), ("1TH",), "float"),
    "teacher_full_logits": Canonical(("BSV", "1TV"), ("1TV",), "float"),
    "opd_full_teacher_index": Canonical(*_ANY, "int"),
    "lm_head.weight": Canonical(("VH",), ("VH",), "float"),
    # One rank's shard of the sequence, so its width is not S.
    "student_logits": Canonical(("BLV",), ("1LV",), "float"),
    "teacher_logits": Canonical(("BLV",), ("1LV",), "float"),
    "d2t": Canonical(("D",), ("D",), "int", "I64"),
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
    for code, found in (("OPD941", shapes), ("OPD942", dtypes)):
        yield from found
        told = {finding.tensor for finding in found}
        names = [tensor.name for tensor in known if where + tensor.name not in told]
        if names:
            message = f"as the names promise: {', '.join(names)}"
            yield _finding(code, "pass", message, where or None)


def _shapes(known: list[Stored], packed: bool, where: str) -> Iterator[Finding]:
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in known:
        canonical = TABLE[tensor.name]
        forms = canonical.packed if packed else canonical.padded
        also = [form for form in canonical.also if not packed or form != "BS"]
        fitting = [form for form in (*forms, *also) if _fits(form, tensor.shape)]
        if not any(form in forms for form in fitting):
            yield _finding(
                "OPD941",
                "warn" if fitting else "fail",
                f"has shape {list(tensor.shape)}; expected {' or '.join(map(_shown, forms))}",
                where + tensor.name,
            )
        if not fitting:
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
        canonical = TABLE[tensor.name]
        kind, exact = canonical.kind, canonical.exact
        if tensor.dtype in KINDS[kind] and exact in (None, tensor.dtype):
            continue
        # Integer masks of zeros and ones are common and read without loss.
        read = tensor.dtype in KINDS[kind] or (kind == "mask" and tensor.dtype in INTS)
        yield _finding(
            "OPD942",
            "warn" if read else "fail",
            f"has dtype {tensor.dtype}; expected {exact or WORDS[kind]}",
            where + tensor.name,
        )


def _finding(
    code: str, status: Literal["pass", "warn", "fail"], message: str, tensor: str | None
) -> Finding:
    return Finding(code=code, name=check_name(code), status=status, message=message, tensor=tensor)
