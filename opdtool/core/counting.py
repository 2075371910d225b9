"""How often each token id occurs, taken in piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor

from opdtool.core.errors import InputError

MOST_STRAYS = 10
"""How many ids outside the vocabulary are remembered with their places."""


class TokenCounter:
    """Occurrences of the ids 0..V-1.

    Ids outside are not counted among them: ``outside`` says how many there were, and
    ``strays`` holds the first few as (row, column, id).
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise InputError(f"a vocabulary of {vocab_size} ids has nothing to count")
        self.vocab_size = vocab_size
        self.counts = torch.zeros(vocab_size, dtype=torch.int64)
        self.outside = 0
        self.strays: list[tuple[int, int, int]] = []

    @property
    def total(self) -> int:
        """All that was counted."""
        return int(self.counts.sum())

    def add(self, ids: Tensor, keep: Tensor, *, first_row: int = 0) -> None:
        """Count the ids [R, S] where ``keep`` [R, S] is true.

        ``first_row`` is the number of their first row, for the places of strays.
        """
        if ids.numel() == 0:
            return
        low, high = ids.aminmax()
        if int(low) < 0 or int(high) >= self.vocab_size:
            keep = self._without_strays(ids, keep, first_row)
        # One bin more takes what is not counted: cheaper than gathering the rest.
        bins = torch.where(keep, ids, self.vocab_size).to(torch.int64).reshape(-1)
        self.counts += torch.bincount(bins, minlength=self.vocab_size + 1)[:-1]

    def _without_strays(self, ids: Tensor, keep: Tensor, first_row: int) -> Tensor:
        stray = keep & ((ids < 0) | (ids >= self.vocab_size))
        found = int(stray.sum())
        self.outside += found
        if found and len(self.strays) < MOST_STRAYS:
            for row, column in stray.nonzero()[: MOST_STRAYS - len(self.strays)].tolist():
                self.strays.append((first_row + row, column, int(ids[row, column])))
        return keep & ~stray


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
    if token_mask is None:
        keep = torch.ones(len(lengths), width, dtype=torch.bool)
    else:
        keep = token_mask != 0
    if sample_mask is not None:
        keep &= (sample_mask != 0)[:, None]
    if bool((lengths < width).any()):
        keep &= torch.arange(width) < lengths[:, None]
    return keep
