"""Tensors in safetensors files, read lazily and in slices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.io.closing import Closing
from opdtool.io.header import BITS, READABLE, Entry, Header, read_header
from opdtool.io.places import Places, find_places
from opdtool.io.pread import SourceFile
from opdtool.io.slices import Rows, read_box, read_rows

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """The same storage under a dtype of its size that torch can index: it lacks most operations
    for wide unsigned integers and for 8-bit floats."""
    return tensor.view(_PLAIN[tensor.element_size()])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor. ``dtype`` is the format's own word, such as ``BF16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    path: Path | None = None
    """The file that holds it, where one does."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return BITS[self.dtype] // 8

    @property
    def readable(self) -> bool:
        """Whether its values can be read: torch lacks a few dtypes of the format."""
        return self.dtype in TORCH_DTYPES

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype. InputError for the few of the format that cannot be read here."""
        if not self.readable:
            where = f"{self.path}: " if self.path else ""
            raise InputError(
                f"{where}{self.name} has dtype {self.dtype}, which cannot be read; "
                f"store it as one of {', '.join(READABLE)}"
            )
        return TORCH_DTYPES[self.dtype]


class TensorSource(Closing):
    """The tensors of one or several files, under their canonical names.

    Made by :func:`open_tensors`. Nothing is read but headers until a tensor is asked for;
    what is read lands in fresh memory. Reads may come from several threads.
    """

    def __init__(self, places: Places, rename: Mapping[str, str], *, strict: bool) -> None:
        self._places = places
        self._open: dict[Path, tuple[SourceFile, Header]] = {}
        self._closed = False
        self._file_of: dict[str, Path] = {}
        try:
            for path in () if places.index else places.files:
                for name in self._opened(path)[1].entries:
                    if name in self._file_of:
                        raise InputError(
                            f"{path}: tensor {name} is in {self._file_of[name]} too; "
                            "give files whose names differ"
                        )
                    self._file_of[name] = path
            self._file_of.update(places.index or {})
            self._theirs = self._renamed(rename, strict)
        except BaseException:
            self.close()
            raise

    def _renamed(self, rename: Mapping[str, str], strict: bool) -> dict[str, str]:
        """The stored name behind every canonical one."""
        where = self._where()
        taken: dict[str, str] = {}
        for canonical, theirs in rename.items():
            if theirs not in self._file_of:
                if strict:
                    near = _near(theirs, self._file_of)
                    raise InputError(f"{where}: --rename {canonical}={theirs}: no {theirs}; {near}")
                continue
            if theirs in taken.values():
                raise InputError(f"{where}: --rename gives {theirs} two names; give it one")
            taken[canonical] = theirs
        moved = set(taken.values())
        for canonical, theirs in taken.items():
            if canonical in self._file_of and canonical not in moved:
                raise InputError(
                    f"{where}: --rename {canonical}={theirs}, but there is a {canonical} already; "
                    f"rename that one too, such as --rename {canonical}_was={canonical}"
                )
        self.used_renames = frozenset(taken)
        return {**{name: name for name in self._file_of if name not in moved}, **taken}

    def _opened(self, path: Path) -> tuple[SourceFile, Header]:
        if self._closed:
            raise ValueError(f"{path} is closed")
        if path not in self._open:
            file = SourceFile(path)
            try:
                self._open[path] = file, read_header(file)
            except BaseException:
                file.close()
                raise
        return self._open[path]

    def _where(self) -> str:
        paths = self._places.asked
        return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The safetensors files, in the order in which they were given or found."""
        return self._places.files

    def names(self) -> list[str]:
        """The canonical names, sorted."""
        return sorted(self._theirs)

    def __contains__(self, name: object) -> bool:
        return name in self._theirs

    def __len__(self) -> int:
        return len(self._theirs)

    def original_name(self, name: str) -> str:
        """The name under which the file has it."""
        self._require(name)
        return self._theirs[name]

    def path_of(self, name: str) -> Path:
        """The file that holds it."""
        self._require(name)
        return self._file_of[self._theirs[name]]

    def _require(self, name: str) -> None:
        if name not in self._theirs:
            raise InputError(
                f"{self._where()}: no tensor {name}; {_near(name, self._theirs)}; "
                f"if it has another name, pass --rename {name}=THEIRS"
            )

    def _entry(self, name: str) -> tuple[SourceFile, Entry]:
        path = self.path_of(name)
        file, header = self._opened(path)
        stored = self._theirs[name]
        if stored not in header.entries:
            raise InputError(
                f"{path}: no tensor {stored}, though {self._places.index_path} says so; "
                "download the checkpoint again"
            )
        return file, header.entries[stored]

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and bytes of a tensor.

        Raises:
            InputError: there is none of that name; it lists those that are there.
        """
        file, entry = self._entry(name)
        return TensorInfo(name, entry.dtype, entry.shape, entry.nbytes, Path(file.path))

    require = info

    def metadata(self, path: Path | None = None) -> dict[str, str]:
        """The free-form metadata of one file (the first, unless told)."""
        return dict(self._opened(path or self.paths[0])[1].metadata)

    def read(self, name: str, *slices: slice) -> Tensor:
        """``tensor[slices]`` in fresh CPU memory: slices of the leading dimensions, step 1.

        Only the bytes of the slice are read (and, between short runs, the gaps).

        Raises:
            InputError: no such tensor, a dtype that cannot be read, a file that was changed
                since it was opened, or a BOOL that holds a byte other than 0 and 1.
        """
        file, entry = self._entry(name)
        if len(slices) > len(entry.shape):
            raise ValueError(f"{name} {list(entry.shape)} has no dimension {len(slices) - 1}")
        box = [_bounds(part, size) for part, size in zip(slices, entry.shape, strict=False)]
        box += [(0, size) for size in entry.shape[len(slices) :]]
        out, raw = self._empty(name, [stop - start for start, stop in box])
        read_box(file, entry.begin, BITS[entry.dtype] // 8, entry.shape, box, raw)
        return self._checked(name, file, out, raw)

    def read_rows(self, name: str, rows: Rows, columns: slice | None = None) -> Tensor:
        """``tensor[rows]`` or ``tensor[rows, columns]`` for row indices in any order."""
        file, entry = self._entry(name)
        if len(entry.shape) < (1 if columns is None else 2):
            raise ValueError(f"{name} {list(entry.shape)} has no rows and columns to choose")
        rows = np.ascontiguousarray(rows, np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < entry.shape[0]):
            raise ValueError(f"rows {rows.min()}..{rows.max()} of {name} {list(entry.shape)}")
        row_bytes = entry.nbytes // max(entry.shape[0], 1)
        shape, window = [len(rows), *entry.shape[1:]], (0, row_bytes)
        if columns is not None:
            start, stop = _bounds(columns, entry.shape[1])
            column_bytes = row_bytes // max(entry.shape[1], 1)
            shape[1], window = stop - start, (start * column_bytes, stop * column_bytes)
        out, raw = self._empty(name, shape)
        if raw.nbytes:
            table = raw.reshape(len(rows), -1)
            read_rows(file, entry.begin, row_bytes, rows, window, table)
        return self._checked(name, file, out, raw)

    def read_flat(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` in memory order, whatever the shape: [stop - start]."""
        file, entry = self._entry(name)
        itemsize = self.info(name).itemsize
        if not 0 <= start <= stop <= self.info(name).numel:
            raise ValueError(f"elements {start}..{stop} of {name} {list(entry.shape)}")
        out, raw = self._empty(name, [stop - start])
        if raw.nbytes:
            file.read_into(raw.data, entry.begin + start * itemsize)
        return self._checked(name, file, out, raw)

    def chunks(self, name: str, max_bytes: int) -> Iterator[tuple[int, Tensor]]:
        """The whole tensor in flat pieces of at most ``max_bytes``, each with its first element."""
        info = self.info(name)
        step = max(1, max_bytes // info.itemsize)
        for start in range(0, info.numel, step):
            yield start, self.read_flat(name, start, min(start + step, info.numel))

    def _empty(self, name: str, shape: Sequence[int]) -> tuple[Tensor, np.ndarray]:
        """A new tensor and its bytes. The shape was checked against the file's size."""
        out = torch.empty(list(shape), dtype=self.info(name).torch_dtype)
        if out.numel() == 0:
            return out, np.empty(0, np.uint8)
        return out, out.reshape(-1).view(torch.uint8).numpy()

    def _checked(self, name: str, file: SourceFile, out: Tensor, raw: np.ndarray) -> Tensor:
        file.check_unchanged()
        if out.dtype == torch.bool and raw.nbytes and raw.max() > 1:
            raise InputError(
                f"{file.path}: tensor {name} is BOOL and holds the byte {raw.max()}; "
                "0 and 1 are expected"
            )
        return out

    def unchanged(self) -> None:
        """Refuse files that were written to since they were opened."""
        for file, _ in self._open.values():
            file.check_unchanged()

    def close(self) -> None:
        """Close the files. Tensors that were read stay good."""
        self._closed = True
        while self._open:
            self._open.popitem()[1][0].close()


def open_tensors(
    paths: Sequence[Path | str] | Path | str,
    *,
    rename: Mapping[str, str] | None = None,
    strict_rename: bool = True,
) -> TensorSource:
    """The tensors of safetensors files, directories of them, or checkpoint directories.

    ``rename`` maps canonical names to those in the files. Where one ``--rename`` serves
    several inputs, pass ``strict_rename=False`` to each and then :func:`check_renames`.

    Raises:
        InputError: a file that is missing, is none, or is broken; the same tensor in two
            files; a rename of a tensor that is not there or onto one that is.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    return TensorSource(
        find_places([Path(path) for path in given]), rename or {}, strict=strict_rename
    )


def check_renames(rename: Mapping[str, str], *sources: object) -> None:
    """Refuse a rename that none of the sources had a tensor for."""
    for canonical, theirs in rename.items():
        if not any(canonical in getattr(source, "used_renames", ()) for source in sources):
            raise InputError(
                f"--rename {canonical}={theirs}: no input has a tensor {theirs}; "
                "see the names with opdtool inspect"
            )


def _bounds(part: slice, size: int) -> tuple[int, int]:
    start, stop, step = part.indices(size)
    if step != 1:
        raise ValueError("slices of a stored tensor have step 1")
    return start, max(start, stop)


def _near(name: str, there: Iterable[str]) -> str:
    """What there is instead: the names like it, else the first few."""
    names = sorted(there)
    if not names:
        return "it holds no tensors"
    near = difflib.get_close_matches(name, names[:5000], n=3, cutoff=0.6)
    shown = near or names[:8]
    more = len(names) - len(shown)
    return f"it holds {', '.join(shown)}" + (f" and {more} more" if more else "")
