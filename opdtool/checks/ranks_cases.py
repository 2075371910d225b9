"""What the equivalence suite is run on: cases, generated or cut from a batch, and geometries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opdtool.core.geometry import PackGeometry

MAX_SLOTS = 1 << 15
"""Tokens of one case: ranks send what they made of it to one process."""
MAX_PAYLOAD = 1 << 10
"""Positions of one case that are projected."""
TEACHERS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One small batch, a teacher's payload beside it, and a draft vocabulary.

    R of the B rows have a payload: ``hidden`` [R, S, H], ``heads`` [V, H] each, ``logits``
    [R, S, V], ``teacher`` [R]. ``integers`` and ``integer_heads`` are small whole numbers,
    whose products are exact. ``draft_weights`` [R, S, D] are a loss's.
    """

    name: str
    input_ids: Tensor
    lengths: tuple[int, ...]
    token_mask: Tensor
    sample_mask: Tensor
    hidden: Tensor
    heads: tuple[Tensor, ...]
    integers: Tensor
    integer_heads: tuple[Tensor, ...]
    teacher: tuple[int, ...]
    logits: Tensor
    d2t: Tensor
    draft_weights: Tensor

    @property
    def rows(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def payload_lengths(self) -> tuple[int, ...]:
        """The real lengths of the R rows that have a payload, within its width."""
        return tuple(min(n, self.hidden.shape[1]) for n in self.lengths[: len(self.hidden)])


def geometries(tp_size: int, cp_size: int) -> list[PackGeometry]:
    """The ways of padding that are tried at one TP and CP."""
    plain = PackGeometry(cp_size=cp_size, tp_size=tp_size)
    return [
        plain,
        PackGeometry(cp_size=cp_size, tp_size=tp_size, sequence_parallel=True, fp8="tensorwise"),
        PackGeometry(
            cp_size=cp_size,
            tp_size=tp_size,
            pad_multiple=3 * plain.base_multiple,
            pad_packed_multiple=5,
            tail="segment",
        ),
    ]


def describe(geometry: PackGeometry) -> str:
    """A geometry as tables name it."""
    words = [f"TP {geometry.tp_size}", f"CP {geometry.cp_size}"]
    if geometry.sequence_parallel:
        words.append("sequence-parallel")
    words.append(f"sequences to {geometry.sequence_multiple}")
    words.append(f"total to {geometry.total_multiple} ({geometry.tail})")
    return ", ".join(words)


def generated_cases(count: int, tp_size: int, seed: int) -> list[Case]:
    """Random small batches, with rows of one token, of two, and of the full width among them."""
    cases = []
    for number in range(count):
        random = np.random.default_rng([seed, number])
        B, S = int(random.integers(1, 10)), int(random.integers(2, 49))
        lengths = [int(n) for n in random.integers(1, S + 1, B)]
        for row, length in zip(range(1, B), (1, 2, S), strict=False):
            lengths[row] = length
        ids = torch.from_numpy(random.integers(1, 1000, (B, S)))
        mask = torch.from_numpy((random.random((B, S)) < 0.6).astype(np.float32))
        sample = torch.from_numpy((random.random(B) < 0.8).astype(np.float32))
        cases.append(
            build_case(
                f"generated {number}", ids, lengths, mask, sample, tp_size=tp_size, random=random
            )
        )
    return cases


def build_case(
    name: str,
    input_ids: Tensor,
    lengths: Sequence[int],
    token_mask: Tensor,
    sample_mask: Tensor,
    *,
    tp_size: int,
    random: np.random.Generator,
    hidden: Tensor | None = None,
    teacher: Sequence[int] | None = None,
    positions: int = MAX_PAYLOAD,
) -> Case:
    """A case around given rows; whatever is not given is drawn at random.

    ``hidden`` [B, S, H] and ``teacher`` [B] are the batch's own payload and tags, of which at
    most ``positions`` are projected.
    """
    B, S = input_ids.shape
    S_payload = min(S, positions)
    R = max(1, min(B, positions // max(S_payload, 1)))
    V = tp_size * int(random.integers(3, 9))
    D = tp_size * int(random.integers(1, 4))

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    def whole(*shape: int) -> Tensor:
        return torch.from_numpy(random.integers(-4, 5, shape).astype(np.float32))

    dtype = (torch.float32, torch.bfloat16)[int(random.integers(0, 2))]
    payload = normal(R, S_payload, 16) if hidden is None else hidden[:R, :S_payload].clone()
    H = payload.shape[-1]
    tags = random.integers(0, TEACHERS, R).tolist() if teacher is None else list(teacher[:R])
    # Targets may repeat: then gradients of several ranks meet in one column.
    ids = torch.from_numpy(random.integers(0, V, D))
    return Case(
        name=name,
        input_ids=input_ids,
        lengths=tuple(int(n) for n in lengths),
        token_mask=token_mask,
        sample_mask=sample_mask,
        hidden=payload if hidden is not None else payload.to(dtype),
        heads=tuple(normal(V, H).to(dtype) for _ in range(TEACHERS)),
        integers=whole(R, S_payload, 8),
        integer_heads=tuple(whole(V, 8) for _ in range(TEACHERS)),
        teacher=tuple(tag % TEACHERS for tag in tags),
        logits=normal(R, S_payload, V),
        d2t=ids - torch.arange(D),
        draft_weights=whole(R, S_payload, D),
    )
