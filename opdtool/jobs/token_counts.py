"""Token counts from batch files and counts vectors, one file and one slice at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from opdtool.checks.registry import check_name
from opdtool.core.errors import InputError
from opdtool.core.limits import check_ids
from opdtool.core.words import plural
from opdtool.findings import Finding, Scalar

if TYPE_CHECKING:
    from torch import Tensor

    from opdtool.io.batch import Batch
    from opdtool.io.tensors import TensorSource

COUNTS = ("counts", "token_counts", "token_freq")
"""Names under which a safetensors file may hold a counts vector."""
MOST = (1 << 63) - 1
COUNT_BYTES = 16
"""Of every id: its count, and the counts that are added to it."""
UNASKED = 256 << 20
"""Bytes of counts that are held whole whatever the limit: of any vocabulary there is."""
"""The greatest count of one id."""
SLICE = 2 << 20
"""Bytes of ids read at once: small enough to stay in a processor's cache."""


@dataclass(slots=True, kw_only=True)
class Counted:
    """What was counted, over all sources.

    ``counts`` [V], made on ``device``; ``files`` those that were read; ``rows`` of batches;
    ``real`` tokens in them, whatever the masks say; ``outside`` ids that are no ids of the
    vocabulary, the first of them in ``places``.
    """

    counts: Tensor
    device: str = "cpu"
    files: list[Path] = field(default_factory=list)
    rows: int = 0
    real: int = 0
    outside: int = 0
    places: list[dict[str, Scalar]] = field(default_factory=list)

    @property
    def total(self) -> int | float:
        """All that was counted: an int but for counts that are fractions."""
        from opdtool.core.counting import total_of

        return total_of(self.counts)

    def require_any(self) -> None:
        """Refuse counts by which nothing can be chosen or judged.

        Raises:
            InputError: no token was counted; it says why, and what would help.
        """
        if self.total:
            return
        if self.outside:
            why = f"all {self.outside} counted ids lie outside 0..{len(self.counts) - 1}"
        elif self.real:
            why = "the masks leave no token; --count all counts every real token"
        else:
            why = "all rows are empty" if self.rows else "every count is 0"
        raise InputError(f"{self.files[0]}: no token was counted: {why}")

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
    device: str = "cpu",
) -> Counted:
    """Counts over batch files and counts vectors, added up.

    ``vocab_size`` may be None where a counts vector tells it. ``everything`` counts every
    real token, whatever the masks say.

    Raises:
        InputError: a source that cannot be read or is neither; no vocabulary size; a counts
            vector of another length, or with negative or non-finite entries.
    """
    import torch

    from opdtool.io.npy import is_npy
    from opdtool.io.places import find_places
    from opdtool.jobs.progress import progress

    files = [
        file
        for source in sources
        for file in ([source] if is_npy(source) else find_places([source]).files)
    ]
    renames = rename or {}
    vectors = _vectors(files, renames)
    V = vocab_size or next((len(vector) for vector in vectors.values()), None)
    if V is None:
        raise InputError("batch files do not tell the vocabulary size; give --vocab-size")
    check_ids("--vocab-size", V)
    if max(max_memory, UNASKED) < V * COUNT_BYTES:
        raise InputError(
            f"--vocab-size {V:,} takes {plural(V * COUNT_BYTES, 'byte', ',')} of counts, past "
            f"--max-memory {max_memory}; give the vocabulary's size, or raise the memory"
        )
    found = Counted(counts=torch.zeros(V, dtype=torch.int64), device=device, files=files)
    with progress("counting", sum(_size(file) for file in files), of_bytes=True) as advance:
        for file in files:
            if file in vectors:
                found.counts = _added(file, found.counts, _checked(file, vectors[file], V))
            else:
                _count_batch(found, file, everything, renames, max_memory)
            advance(_size(file))
    return found


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # opening it says what is wrong


def _vectors(files: Sequence[Path], rename: Mapping[str, str]) -> dict[Path, Tensor]:
    """The files that hold a counts vector, with it; the others are batches.

    Raises:
        InputError: a renamed tensor that none of them has.
    """
    found: dict[Path, Tensor] = {}
    used: set[str] = set()
    for file in files:
        vector, renamed = counts_vector(file, rename)
        if vector is not None:
            found[file] = vector
            used |= renamed
    for name, theirs in rename.items():
        # Batches look for their own names, and say where they are missing.
        if name not in used and (name == COUNTS[0] or len(found) == len(files)):
            raise InputError(
                f"--rename {name}={theirs}: no input has such a tensor; "
                "see the names with opdtool inspect"
            )
    return found


def counts_vector(file: Path, rename: Mapping[str, str]) -> tuple[Tensor | None, frozenset[str]]:
    """The counts that a file holds, or None for a batch; and the renames that its names need.

    Raises:
        InputError: a ``.npy`` that is no vector, or a renamed tensor that is none.
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
        return counts, frozenset()
    with open_tensors([file], rename=rename, strict_rename=False) as source:
        renamed = COUNTS[0] in source.used_renames
        if renamed and len(source.info(COUNTS[0]).shape) != 1:
            raise InputError(
                f"{file}: {rename[COUNTS[0]]} has shape {list(source.info(COUNTS[0]).shape)}; a "
                "counts vector [V] was expected"
            )
        name = COUNTS[0] if renamed else _counts_name(source)
        return (None if name is None else source.read(name)), source.used_renames


def _counts_name(source: TensorSource) -> str | None:
    """The tensor that is a counts vector: by its name, or as the only one of integers."""
    from opdtool.checks.canonical import INTS, TABLE

    if "input_ids" in source:
        return None
    names = source.names()
    known = [name for name in COUNTS if name in source]
    if not known and len(names) == 1 and source.info(names[0]).dtype in INTS:
        known = [name for name in names if name.rpartition(".")[2] not in TABLE]
    return next((name for name in known if len(source.info(name).shape) == 1), None)


def _added(file: Path, counts: Tensor, more: Tensor) -> Tensor:
    import torch

    both = counts + more
    if both.is_floating_point() and not bool(torch.isfinite(both.sum())):
        raise InputError(f"{file}: counts that add up past what a float can hold; scale them down")
    if bool((both < 0).any()):  # int64 wraps around
        i = int((both < 0).nonzero()[0])
        raise InputError(
            f"{file}: with the counts before it, id {i} is counted more than {MOST} times"
        )
    return both


def _checked(file: Path, counts: Tensor, V: int) -> Tensor:
    import torch

    if len(counts) != V:
        raise InputError(
            f"{file}: {plural(len(counts), 'count')}; the vocabulary has {plural(V, 'id')} "
            "(--vocab-size), one count "
            "each was expected"
        )
    if counts.dtype == torch.bool:
        raise InputError(f"{file}: counts are bool; numbers were expected")
    if counts.is_floating_point():
        if not bool(torch.isfinite(counts).all()):
            raise InputError(f"{file}: counts that are not finite")
        counts = counts.to(torch.float64)
        if bool((counts == counts.trunc()).all()) and float(counts.abs().max()) < MOST:
            counts = counts.to(torch.int64)
    else:
        unsigned, counts = counts.dtype == torch.uint64, counts.to(torch.int64)
        if unsigned and bool((counts < 0).any()):
            i = int((counts < 0).nonzero()[0])
            raise InputError(
                f"{file}: count {int(counts[i]) + (1 << 64)} of id {i} is past {MOST}, the most "
                "that can be counted; scale the counts down, or save them as float64"
            )
    if bool((counts < 0).any()):
        i = int((counts < 0).nonzero()[0])
        raise InputError(f"{file}: count {counts[i].item()} of id {i}; counts are not negative")
    return counts


def _count_batch(
    found: Counted, file: Path, everything: bool, rename: Mapping[str, str], max_memory: int
) -> None:
    from opdtool.io.batch import open_batch

    own = {name: theirs for name, theirs in rename.items() if name != COUNTS[0]}
    with open_batch([file], rename=own) as batch:
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

    counter = TokenCounter(len(found.counts), found.device)
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
    found.real += int(lengths.clamp(max=batch.width).sum())
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
