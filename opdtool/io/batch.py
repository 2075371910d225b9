"""A batch of B sequences of width S, in one file or several, read lazily.

Several files are one batch: the rows of the second follow those of the first, and so on.
Files may differ in width; S is the largest, and the rows of narrower files are read as if
zeros followed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.closing import Closing
from opdtool.io.lengths import first_not_finite, read_lengths
from opdtool.io.places import find_places
from opdtool.io.slices import Rows
from opdtool.io.tensors import TensorInfo, TensorSource, as_bits, open_tensors

WIDTH_NAMES = (
    "input_ids",
    "token_mask",
    "attention_mask",
    "teacher_full_hidden_states",
    "teacher_full_logits",
)
"""The first of these that the files have says what B and S are."""

NOT_OF_A_BATCH = frozenset(
    {
        "cu_seqlens",
        "cu_seqlens_padded",
        "sequence_index",
        "position_ids",
        "target_ids",
        "draft_token_mask",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
)
"""Canonical names that have a meaning of their own and no rows: packing passes them over."""

Kind = Literal["token", "row"]


@dataclass(frozen=True, slots=True)
class _Part:
    """One file: its rows are ``first`` to ``first + rows - 1`` of the batch."""

    source: TensorSource
    path: Path
    first: int
    rows: int
    width: int


class Batch(Closing):
    """B rows of S tokens. Made by :func:`open_batch`.

    Attributes:
        rows: B.
        width: S.
        lengths: [B] int64, the real tokens of every row.
        lengths_from: what said so: ``input_lengths``, ``attention_mask`` or ``width``.
        token_aligned: names of the [B, S, ...] tensors.
        row_aligned: names of the [B, ...] tensors.
        others: names of the tensors that are neither.
    """

    def __init__(
        self,
        sources: Sequence[TensorSource],
        row_aligned: Collection[str],
        renames: Collection[str],
    ) -> None:
        self.used_renames = frozenset(renames)
        self._parts = _parts(sources)
        self.rows = sum(part.rows for part in self._parts)
        self.width = max(part.width for part in self._parts)
        self._infos: dict[str, TensorInfo] = {}
        kinds = self._classify(row_aligned)
        self.token_aligned = tuple(sorted(name for name in kinds if kinds[name] == "token"))
        self.row_aligned = tuple(sorted(name for name in kinds if kinds[name] == "row"))
        self.others = tuple(
            sorted({n for part in self._parts for n in part.source.names()} - set(kinds))
        )
        self._refuse_dtypes()
        found = [
            read_lengths(part.source, part.path, part.rows, part.width) for part in self._parts
        ]
        self.lengths: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = np.concatenate(
            [lengths for lengths, _ in found]
        )
        self.lengths_from = found[0][1]

    def _refuse_dtypes(self) -> None:
        """Ids are integers; masks are numbers that can be multiplied, which 8-bit floats cannot."""
        for name, kinds, wanted in (
            ("input_ids", "IU", "an integer dtype is expected"),
            ("token_mask", "BIUF", "store it as a bool, an integer or a float of 16 bits or more"),
            ("sample_mask", "BIUF", "store it as a bool, an integer or a float of 16 bits or more"),
        ):
            info = self._infos.get(name)
            if info is None:
                continue
            if info.dtype[0] not in kinds or (info.dtype[0] == "F" and info.itemsize == 1):
                raise InputError(f"{self._parts[0].path}: {name} is {info.dtype}; {wanted}")

    def _classify(self, row_aligned: Collection[str]) -> dict[str, Kind]:
        """Which tensors have rows, and which have tokens; all files must agree on them."""
        first = self._parts[0]
        kinds: dict[str, Kind] = {}
        for name in sorted({name for part in self._parts for name in part.source.names()}):
            shapes = [
                part.source.info(name).shape if name in part.source else None
                for part in self._parts
            ]
            pairs = list(zip(self._parts, shapes, strict=True))
            if not any(shape and shape[0] == part.rows for part, shape in pairs):
                continue
            tokens = name not in row_aligned and all(
                shape is not None and shape[:2] == (part.rows, part.width) for part, shape in pairs
            )
            kinds[name] = "token" if tokens else "row"
            self._infos[name] = self._merged(name, kinds[name], first)
        for name in row_aligned:
            if kinds.get(name) != "row":
                raise InputError(
                    f"{first.path}: --row-aligned {name}: no tensor {name} with "
                    f"{plural(first.rows, 'row')}"
                )
        return kinds

    def _merged(self, name: str, kind: Kind, first: _Part) -> TensorInfo:
        """The tensor as if all files were one."""
        skip = 2 if kind == "token" else 1
        for part in self._parts:
            if name not in part.source:
                holder = next(p for p in self._parts if name in p.source)
                raise InputError(
                    f"{part.path}: no tensor {name}, which {holder.path} has; "
                    "the files of one batch hold the same tensors"
                )
            info, base = part.source.info(name), first.source.info(name)
            same = info.dtype == base.dtype and info.shape[skip:] == base.shape[skip:]
            if not same or info.shape[:1] != (part.rows,) or len(info.shape) != len(base.shape):
                raise InputError(
                    f"{part.path}: {name} is {info.dtype} {list(info.shape)} where {first.path} "
                    f"has {base.dtype} {list(base.shape)}; the files of one batch agree"
                )
        info = first.source.info(name)
        lead = (self.rows, self.width) if kind == "token" else (self.rows,)
        shape = (*lead, *info.shape[skip:])
        return TensorInfo(
            name, info.dtype, shape, int(np.prod(shape, dtype=object)) * info.itemsize
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """The batch's files, in row order."""
        return tuple(part.path for part in self._parts)

    def names(self) -> list[str]:
        """The canonical names of all tensors, sorted."""
        return sorted({*self._infos, *self.others})

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor with rows, over all files.

        Raises:
            InputError: there is none of that name; it lists those that are there.
        """
        if name not in self._infos:
            found = self._parts[0].source.info(name)  # says what is missing
            raise InputError(
                f"{self._parts[0].path}: {name} is {list(found.shape)}; "
                f"a tensor with {plural(self.rows, 'row')} is expected"
            )
        return self._infos[name]

    require = info

    def read(
        self, name: str, rows: slice | Rows = slice(None), columns: slice | None = None
    ) -> Tensor:
        """``tensor[rows]`` or ``tensor[rows, columns]``, in the order asked for.

        ``rows`` is a slice of step 1 or an array of row numbers, which may repeat.
        """
        info = self.info(name)
        if columns is not None and name not in self.token_aligned:
            raise ValueError(f"{name} {list(info.shape)} has no columns of tokens")
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.rows)
            if step != 1:
                raise ValueError("slices of a batch have step 1")
            wanted = range(start, max(start, stop))
            pieces = [(p, *_overlap(wanted, p)) for p in self._parts]
            pieces = [piece for piece in pieces if piece[1] < piece[2]]
            if len(pieces) == 1 and pieces[0][0].width == self.width:
                part, first, last = pieces[0]
                own = slice(first - part.first, last - part.first)
                slices = (own,) if columns is None else (own, columns)
                return part.source.read(name, *slices)
            rows = np.arange(start, max(start, stop), dtype=np.int64)
        rows = np.asarray(rows, np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.rows):
            raise ValueError(f"rows {rows.min()}..{rows.max()} of a batch of {self.rows}")
        if len(self._parts) == 1:
            return self._parts[0].source.read_rows(name, rows, columns)
        return self._gather(info, rows, columns)

    def _gather(self, info: TensorInfo, rows: Rows, columns: slice | None) -> Tensor:
        """Rows from several files, the narrower ones filled up with zeros."""
        shape = [len(rows), *info.shape[1:]]
        tokens = info.name in self.token_aligned
        left, right, _ = (columns or slice(None)).indices(self.width)
        right = max(left, right)
        if tokens:
            shape[1] = right - left
        out = torch.empty(shape, dtype=info.torch_dtype)
        bits = as_bits(out)
        for part in self._parts:
            mine = np.flatnonzero((rows >= part.first) & (rows < part.first + part.rows))
            if not len(mine):
                continue
            own = rows[mine] - part.first
            to = torch.from_numpy(mine)
            if not tokens:
                bits[to] = as_bits(part.source.read_rows(info.name, own))
                continue
            inner = slice(min(left, part.width), min(right, part.width))
            have = inner.stop - inner.start
            if have:
                bits[to, :have] = as_bits(part.source.read_rows(info.name, own, inner))
            if have < right - left:
                bits[to, have:] = 0
        return out

    def sample_mask(self) -> Tensor | None:
        """[B] in the dtype that is stored, or None; not [B] or not finite is refused."""
        if "sample_mask" not in self:
            if "sample_mask" in self.others:
                self.info("sample_mask")
            return None
        info = self.info("sample_mask")
        if len(info.shape) != 1:
            raise InputError(
                f"{self._parts[0].path}: sample_mask is {list(info.shape)}; [{self.rows}] is "
                "expected, one weight a row"
            )
        mask = self.read("sample_mask")
        self._refuse_not_finite(mask, "sample_mask", np.arange(self.rows))
        return mask

    def token_mask(self, rows: slice | Rows = slice(None), columns: slice | None = None) -> Tensor:
        """[rows, S], or some columns of it, in the dtype that is stored; not [B, S] or not
        finite is refused."""
        info = self.info("token_mask")
        if info.shape != (self.rows, self.width):
            raise InputError(
                f"{self._parts[0].path}: token_mask is {list(info.shape)}; "
                f"[{self.rows}, {self.width}] is expected, one weight a token"
            )
        mask = self.read("token_mask", rows, columns)
        numbers = np.arange(self.rows)[rows] if isinstance(rows, slice) else np.asarray(rows)
        self._refuse_not_finite(mask, "token_mask", numbers, columns.start if columns else 0)
        return mask

    def _refuse_not_finite(self, mask: Tensor, name: str, rows: Rows, column: int = 0) -> None:
        """``rows`` are the numbers of the mask's rows in the batch, ``column`` of its first
        column."""
        place = first_not_finite(mask)
        if place is None:
            return
        path, row = self.file_of(int(rows[place[0]]))
        index = ", ".join(str(part) for part in (row, *(at + column for at in place[1:])))
        raise InputError(
            f"{path}: {name}[{index}] is {mask[place].item()}; a finite weight is expected"
        )

    def row_chunks(self, name: str, max_bytes: int) -> Iterator[slice]:
        """Slices of rows that cover the batch, each of at most ``max_bytes`` (or one row)."""
        row_bytes = self.info(name).nbytes // self.rows
        step = max(1, max_bytes // max(row_bytes, 1))
        for start in range(0, self.rows, step):
            yield slice(start, min(start + step, self.rows))

    def file_of(self, row: int) -> tuple[Path, int]:
        """The file that holds a row, and the row's number in that file."""
        for part in self._parts:
            if part.first <= row < part.first + part.rows:
                return part.path, row - part.first
        raise ValueError(f"row {row} of a batch of {self.rows}")

    def refuse_others(self) -> None:
        """Refuse a batch that holds tensors which packing would have to leave out.

        Raises:
            InputError: a tensor has neither B rows nor a canonical name of its own.
        """
        for name in self.others:
            if name not in NOT_OF_A_BATCH:
                info = next(p.source.info(name) for p in self._parts if name in p.source)
                raise InputError(
                    f"{self._parts[0].path}: {name} is {list(info.shape)}, neither [B, S, ...] nor "
                    f"[B, ...] with B = {self.rows}, S = {self.width}; keep it in a file of its own"
                )

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.source.close()


def open_batch(
    paths: Sequence[Path | str] | Path | str,
    *,
    rename: Mapping[str, str] | None = None,
    row_aligned: Collection[str] = (),
    strict_rename: bool = True,
) -> Batch:
    """The batch in one or several files (or a directory of them), rows in the order given.

    Raises:
        InputError: a file that cannot be read; no tensor that tells B and S; no rows; files
            that disagree; ids or lengths that are not integers; lengths that are negative or
            past S; an ``attention_mask`` that is needed and is no right-padded prefix, or that
            contradicts ``input_lengths``.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = find_places([Path(path) for path in given]).files
    sources: list[TensorSource] = []
    try:
        for path in files:
            sources.append(open_tensors([path], rename=rename, strict_rename=strict_rename))
        return Batch(sources, row_aligned, sources[0].used_renames)
    except BaseException:
        for source in sources:
            source.close()
        raise


def _overlap(wanted: range, part: _Part) -> tuple[int, int]:
    return max(wanted.start, part.first), min(wanted.stop, part.first + part.rows)


def _parts(sources: Sequence[TensorSource]) -> list[_Part]:
    shapes = [_rows_and_width(source) for source in sources]
    firsts = itertools.accumulate((rows for rows, _ in shapes), initial=0)
    return [
        _Part(source, source.paths[0], first, rows, width)
        for source, first, (rows, width) in zip(sources, firsts, shapes, strict=False)
    ]


def _rows_and_width(source: TensorSource) -> tuple[int, int]:
    path = source.paths[0]
    for name in WIDTH_NAMES:
        if name not in source:
            continue
        shape = source.info(name).shape
        dims = 3 if name.startswith("teacher_") else 2
        if len(shape) != dims:
            letters = "[B, S, ...]" if dims == 3 else "[B, S]"
            raise InputError(f"{path}: {name} is {list(shape)}; {letters} is expected")
        if 0 in shape[:2]:
            raise InputError(
                f"{path}: {name} is {list(shape)}: an empty batch; give rows of tokens"
            )
        return shape[0], shape[1]
    source.info("input_ids")  # says what is missing, and what is there
    raise AssertionError("input_ids was not missing")
