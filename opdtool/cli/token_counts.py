"""Token counts from batch files and counts vectors, one file and one slice at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from opdtool.checks.registry import check_name
from opdtool.core.errors import InputError
from opdtool.findings import Finding, Scalar

if TYPE_CHECKING:
    from torch import Tensor

    from opdtool.io.batch import Batch

COUNTS = ("counts", "token_counts", "token_freq")
"""Names under which a safetensors file may hold a counts vector."""
SLICE = 2 << 20
"""Bytes of ids read at once: small enough to stay in a processor's cache."""


@dataclass(slots=True, kw_only=True)
class Counted:
    """What was counted, over all sources.

    ``counts`` [V]; ``files`` those that were read; ``rows`` of batches; ``outside`` ids that
    are no ids of the vocabulary, the first of them in ``places``.
    """

    counts: Tensor
    files: list[Path] = field(default_factory=list)
    rows: int = 0
    outside: int = 0
    places: list[dict[str, Scalar]] = field(default_factory=list)

    @property
    def total(self) -> float:
        """All that was counted: an int but for counts that are fractions."""
        return self.counts.sum().item()

    def finding(self) -> Finding:
        """The check that every counted id lies in the vocabulary: it warns and never fails."""
        V = len(self.counts)
        if self.outside:
            first = self.places[0]
            message = (
                f"{self.outside} counted ids lie outside 0..{V - 1} and were left out; the first: "
                f"{first['actual']} at sequence {first['sequence']}, position {first['position']} "
                f"of {first['file']}"
            )
        else:
            message = f"all counted ids lie in 0..{V - 1}"
        return Finding(
            code="OPD417",
            name=check_name("OPD417"),
            status="warn" if self.outside else "pass",
            message=message,
            tensor="input_ids",
            mismatches=self.outside or None,
            total=int(self.total) + self.outside if self.outside else None,
            first=tuple(self.places),
        )


def count_sources(
    sources: Sequence[Path],
    *,
    vocab_size: int | None,
    everything: bool = False,
    rename: Mapping[str, str] | None = None,
    max_memory: int = 1 << 30,
) -> Counted:
    """Counts over batch files and counts vectors, added up.

    ``vocab_size`` may be None where a counts vector tells it. ``everything`` counts every
    real token, whatever the masks say.

    Raises:
        InputError: a source that cannot be read or is neither; no vocabulary size; a counts
            vector of another length, or with negative or non-finite entries.
    """
    import torch

    from opdtool.cli.progress import progress
    from opdtool.io.npy import is_npy
    from opdtool.io.places import find_places

    files = [
        file
        for source in sources
        for file in ([source] if is_npy(source) else find_places([source]).files)
    ]
    vectors = {file: vector for file in files if (vector := counts_vector(file)) is not None}
    V = vocab_size or next((len(vector) for vector in vectors.values()), None)
    if V is None:
        raise InputError("batch files do not tell the vocabulary size; give --vocab-size")
    if V > 1 << 31:
        raise InputError(f"--vocab-size {V} is more than token ids can count, which is {1 << 31}")
    found = Counted(counts=torch.zeros(V, dtype=torch.int64), files=files)
    with progress("counting", sum(_size(file) for file in files), of_bytes=True) as advance:
        for file in files:
            if file in vectors:
                found.counts = found.counts + _checked(file, vectors[file], V)
            else:
                _count_batch(found, file, everything, rename or {}, max_memory)
            advance(_size(file))
    return found


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # opening it says what is wrong


def counts_vector(file: Path) -> Tensor | None:
    """The counts that a file holds, or None for a batch.

    Raises:
        InputError: a ``.npy`` that is no vector.
    """
    from opdtool.io.npy import is_npy, read_npy
    from opdtool.io.tensors import open_tensors

    if is_npy(file):
        counts = read_npy(file)
        if counts.dim() != 1:
            raise InputError(
                f"{file}: {list(counts.shape)}; a counts vector [V] was expected (batches are "
                "safetensors)"
            )
        return counts
    with open_tensors([file]) as source:
        for name in COUNTS:
            if name in source and len(source.info(name).shape) == 1 and "input_ids" not in source:
                return source.read(name)
    return None


def _checked(file: Path, counts: Tensor, V: int) -> Tensor:
    import torch

    if len(counts) != V:
        raise InputError(
            f"{file}: {len(counts)} counts; the vocabulary has {V} ids (--vocab-size), one count "
            "each was expected"
        )
    if counts.is_floating_point():
        if not bool(torch.isfinite(counts).all()):
            raise InputError(f"{file}: counts that are not finite")
        counts = counts.to(torch.float64)
        if bool((counts == counts.trunc()).all()):
            counts = counts.to(torch.int64)
    else:
        counts = counts.to(torch.int64)
    if bool((counts < 0).any()):
        i = int((counts < 0).nonzero()[0])
        raise InputError(f"{file}: count {counts[i].item()} of id {i}; counts are not negative")
    return counts


def _count_batch(
    found: Counted, file: Path, everything: bool, rename: Mapping[str, str], max_memory: int
) -> None:
    from opdtool.io.batch import open_batch

    with open_batch([file], rename=rename) as batch:
        batch.require("input_ids")
        if not everything and "token_mask" not in batch:
            raise InputError(
                f"{file}: no token_mask says which tokens are trained on; "
                "--count all counts every real token"
            )
        _count_rows(found, file, batch, everything, max_memory)


def _count_rows(
    found: Counted, file: Path, batch: Batch, everything: bool, max_memory: int
) -> None:
    import torch

    from opdtool.core.counting import MOST_STRAYS, TokenCounter, trained

    counter = TokenCounter(len(found.counts))
    sample_mask = None if everything else batch.sample_mask()
    if not everything:
        batch.token_mask(slice(0, 0))  # refuses what is not [B, S]
    lengths = torch.from_numpy(batch.lengths)
    for rows in batch.row_chunks("input_ids", min(SLICE, max(1, max_memory // 16))):
        ids = batch.read("input_ids", rows)
        keep = trained(
            None if everything else _weights(batch, rows),
            None if sample_mask is None else sample_mask[rows],
            lengths[rows],
            batch.width,
        )
        counter.add(ids, keep, first_row=rows.start)
    found.counts = found.counts + counter.counts
    found.rows += batch.rows
    found.outside += counter.outside
    for row, column, token in counter.strays[: MOST_STRAYS - len(found.places)]:
        found.places.append(
            {"file": file.name, "sequence": row, "position": column, "actual": token}
        )


def _weights(batch: Batch, rows: slice) -> Tensor:
    """The token mask's rows. Their sum is finite where they all are, and cheaper to look at."""
    weights = batch.read("token_mask", rows)
    if weights.is_floating_point() and not math.isfinite(float(weights.sum())):
        return batch.token_mask(rows)  # refuses, or the sum alone is not finite
    return weights
