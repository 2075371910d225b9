"""A draft vocabulary under test, and the facts that checks and faults are judged by.

``ids`` are the target ids ``i + d2t[i]`` (contract 5.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from opdtool.checks.registry import check_name
from opdtool.core.errors import InputError
from opdtool.findings import MAX_PLACES, Finding, Scalar, Status


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftCase:
    """A draft vocabulary under test, and what is known of what it should be.

    Attributes:
        d2t: [D], as stored.
        t2d: [V] as stored, or None.
        vocab_size: V of the target; None where nothing tells it.
        draft_vocab_size: D as configured; None where nothing tells it.
        head_rows: rows of the draft's output layer; None without one.
        tp: tensor-parallel size to divide by.
        pad_multiple: the target's head is padded to a multiple of this.
        must_include: target ids that the draft must have.
        end_ids: ids that end a text, of the model's configuration: missing ones are warned of.
        against: the ids [D] of the map that this one should equal.
        tokenizer_size: how many ids the tokenizer has.
    """

    d2t: Tensor
    t2d: Tensor | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    head_rows: int | None = None
    tp: int = 1
    pad_multiple: int = 1
    must_include: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    against: Tensor | None = None
    tokenizer_size: int | None = None

    def __post_init__(self) -> None:
        if self.d2t.dim() != 1 or len(self.d2t) == 0:
            raise InputError(
                f"d2t has shape {list(self.d2t.shape)}; [D] was expected, one offset a draft id"
            )
        if self.d2t.is_complex():
            raise InputError(f"d2t is {self.d2t.dtype}; integers were expected")
        if self.t2d is not None and self.t2d.dim() != 1:
            raise InputError(f"t2d has shape {list(self.t2d.shape)}; [V] was expected")
        for what, size in (("vocabulary", self.vocab_size), ("draft", self.draft_vocab_size)):
            if size is not None and size < 1:
                raise InputError(f"the {what} size is {size}; it must be at least 1")
        # Where D does not divide either, the map is at fault, and that is found and named.
        if self.padded and self.padded % self.tp and self.wanted_size % self.tp == 0:
            raise InputError(self._uneven())

    def _uneven(self) -> str:
        assert self.padded is not None
        padded = "" if self.padded == self.targets else f", padded to {self.padded},"
        return (
            f"the target vocabulary of {self.targets} ids{padded} does not divide by --tp "
            f"{self.tp}: {self.padded % self.tp} left over; choose another, or say how the "
            f"teacher's head is padded (such as --pad-vocab-to-multiple-of {self.tp})"
        )

    @cached_property
    def offsets(self) -> Tensor:
        """[D] int64: d2t as it would be read, fractions cut off."""
        return self.d2t.detach().cpu().to(torch.int64)

    @cached_property
    def ids(self) -> Tensor:
        """[D] int64: the target id of every draft id, in range or not."""
        return torch.arange(len(self.offsets)) + self.offsets

    @property
    def entries(self) -> int:
        """Entries of d2t."""
        return len(self.offsets)

    @property
    def targets(self) -> int | None:
        """Target ids: as configured, else as many as t2d speaks of, else unknown."""
        if self.vocab_size is not None:
            return self.vocab_size
        return None if self.t2d is None else len(self.t2d)

    @property
    def padded(self) -> int | None:
        """Rows of the target's head; unknown where the target ids are."""
        if self.targets is None:
            return None
        return -(-self.targets // self.pad_multiple) * self.pad_multiple

    @property
    def wanted_size(self) -> int:
        """D as configured, else as found."""
        return self.draft_vocab_size or self.entries

    @cached_property
    def outside(self) -> Tensor:
        """[D] bool: ids outside the vocabulary; where V is unknown, negative ones alone."""
        low = self.ids < 0
        return low if self.targets is None else low | (self.ids >= self.targets)

    @cached_property
    def repeated(self) -> Tensor:
        """[D] bool: ids that an earlier draft id has too."""
        order = torch.sort(self.ids, stable=True)
        again = torch.zeros(self.entries, dtype=torch.bool)
        again[order.indices[1:]] = order.values[1:] == order.values[:-1]
        return again

    @cached_property
    def descents(self) -> Tensor:
        """[D] bool: ids that are lower than the one before them."""
        down = torch.zeros(self.entries, dtype=torch.bool)
        down[1:] = self.ids[1:] < self.ids[:-1]
        return down

    @cached_property
    def allowed(self) -> Tensor | None:
        """t2d as bool; None when there is none, or when it cannot be read as one."""
        if self.t2d is None or self.t2d.dtype == torch.bool:
            return None if self.t2d is None else self.t2d.detach().cpu()
        t2d = self.t2d.detach().cpu()
        return t2d.bool() if bool(((t2d == 0) | (t2d == 1)).all()) else None

    @cached_property
    def marked(self) -> Tensor | None:
        """Ids that t2d marks, ascending; None where there is no readable t2d."""
        return None if self.allowed is None else self.allowed.nonzero().squeeze(-1)

    @cached_property
    def t2d_wrong(self) -> Tensor | None:
        """Target ids on which t2d and d2t disagree, either way, ascending."""
        if self.allowed is None:
            return None
        assert self.marked is not None
        reach = max(len(self.allowed), self.targets or 0)
        mine = self.ids[(self.ids >= 0) & (self.ids < reach)]
        return torch.from_numpy(np.setxor1d(mine.numpy(), self.marked.numpy()))

    @property
    def t2d_agrees(self) -> bool:
        """Whether a readable t2d is there and marks exactly the ids of d2t."""
        wrong = self.t2d_wrong
        return wrong is not None and not len(wrong) and not bool(self.outside.any())

    @property
    def equals_against(self) -> bool:
        """Whether another map was given and is the same."""
        return self.against is not None and torch.equal(self.ids, self.against)

    @property
    def is_map(self) -> bool:
        """Whether every draft id stands for a target id of its own, inside the vocabulary."""
        return not bool((self.outside | self.repeated).any())

    @property
    def all_zero(self) -> bool:
        """Every offset is 0, and nothing says that the draft ids are the first target ids."""
        if bool((self.offsets != 0).any()) or self.entries == self.targets:
            return False
        return not (
            self.marked is not None and torch.equal(self.marked, torch.arange(self.entries))
        )

    @property
    def arange(self) -> bool:
        """Offset i is i, so that id is 2i, and nothing says that it should be."""
        if self.entries < 2 or not torch.equal(self.offsets, torch.arange(self.entries)):
            return False
        return not (self.t2d_agrees or self.equals_against)

    @property
    def missing_specials(self) -> tuple[int, ...]:
        """Required ids that the draft vocabulary has not."""
        return absent(self.must_include, self.ids)


def absent(wanted: Iterable[int], ids: Tensor) -> tuple[int, ...]:
    """Those of ``wanted`` that are not among ``ids``."""
    return tuple(one for one in dict.fromkeys(wanted) if not bool((ids == one).any()))


def finding(
    code: str,
    status: Status,
    message: str,
    tensor: str | None = "d2t",
    *,
    mismatches: int | None = None,
    total: int | None = None,
    first: Iterable[Mapping[str, Scalar]] = (),
) -> Finding:
    return Finding(
        code=code,
        name=check_name(code),
        status=status,
        message=message,
        tensor=tensor,
        mismatches=mismatches,
        total=total,
        first=tuple(first),
    )


def draft_places(case: DraftCase, wrong: Tensor) -> list[dict[str, Scalar]]:
    """The first entries of d2t that ``wrong`` marks."""
    return [
        {"draft_id": i, "offset": int(case.offsets[i]), "target_id": int(case.ids[i])}
        for i in wrong.nonzero().squeeze(-1)[:MAX_PLACES].tolist()
    ]
