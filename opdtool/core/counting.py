"""How often each token id occurs, taken in piece by piece."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.offsets import Ints
from opdtool.core.words import plural

PENDING = 1 << 20
"""Ids gathered before they are counted: a count touches all V bins once."""
MOST_STRAYS = 10
"""How many ids outside the vocabulary are remembered with their places."""


class TokenCounter:
    """Occurrences of the ids 0..V-1.

    Ids outside are not counted among them: ``outside`` says how many there were, and
    ``strays`` holds the first few as (row, column, id).
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        if vocab_size < 1:
            raise InputError(f"a vocabulary of {plural(vocab_size, 'id')} has nothing to count")
        self.vocab_size = vocab_size
        self.outside = 0
        self.strays: list[tuple[int, int, int]] = []
        self._counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._pending = np.empty(PENDING, dtype=np.int64)
        self._filled = 0

    @property
    def counts(self) -> Tensor:
        """[V] int64."""
        self._count_pending()
        return self._counts.cpu()

    def add(self, ids: Tensor, keep: Tensor, *, first_row: int = 0) -> None:
        """Count the ids [R, S] where ``keep`` [R, S] is true.

        ``first_row`` is the number of their first row, for the places of strays.
        """
        # numpy picks by a mask many times faster than torch does on a CPU.
        found = np.compress(keep.numpy().reshape(-1), ids.numpy().reshape(-1))
        found = found.astype(np.int64, copy=False)
        # As unsigned numbers negative ids are past the vocabulary too: one pass finds both.
        if found.size and int(found.view(np.uint64).max()) >= self.vocab_size:
            self._note_strays(ids, keep, first_row)
            found = found[(found >= 0) & (found < self.vocab_size)]
        for start in range(0, len(found), PENDING):
            self._append(found[start : start + PENDING])

    def _append(self, found: Ints) -> None:
        if self._filled + len(found) > PENDING:
            self._count_pending()
        self._pending[self._filled : self._filled + len(found)] = found
        self._filled += len(found)

    def _count_pending(self) -> None:
        ids = torch.from_numpy(self._pending[: self._filled]).to(self._counts.device)
        self._counts += torch.bincount(ids, minlength=self.vocab_size)
        self._filled = 0

    def _note_strays(self, ids: Tensor, keep: Tensor, first_row: int) -> None:
        wide = ids.to(torch.int64)  # torch compares no wide unsigned integers
        stray = keep & ((wide < 0) | (wide >= self.vocab_size))
        self.outside += int(stray.sum())
        for row, column in stray.nonzero()[: MOST_STRAYS - len(self.strays)].tolist():
            self.strays.append((first_row + row, column, ids[row, column].numpy().item()))


def total_of(counts: Tensor) -> int | float:
    """The sum of counts: exact for integers, however large."""
    if counts.is_floating_point():
        return counts.sum(dtype=torch.float64).item()
    wide = counts.to(torch.int64)
    # A sum of int64 wraps around in silence; those of the two halves have room.
    high, low = (wide >> 32).sum().item(), (wide & 0xFFFFFFFF).sum().item()
    return (int(high) << 32) + int(low)


def trained(
    token_mask: Tensor | None, sample_mask: Tensor | None, lengths: Tensor, width: int
) -> Tensor:
    """[R, S] bool: real tokens whose weight is not zero.

    Args:
        token_mask: [R, S] weights; None counts every real token.
        sample_mask: [R] weights; None keeps every row.
        lengths: [R] real tokens.
        width: S.
    """
    # numpy compares several times faster than torch does on a CPU, but for the cast to bool.
    shape = (len(lengths), width)
    keep = np.ones(shape, bool) if token_mask is None else token_mask.to(torch.bool).numpy()
    if sample_mask is not None:
        keep = keep & (sample_mask != 0).numpy()[:, None]
    if bool((lengths < width).any()):
        real = np.arange(width, dtype=np.int32) < lengths.to(torch.int32).numpy()[:, None]
        keep = keep & real
    return torch.from_numpy(keep)
