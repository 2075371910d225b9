"""The header of a safetensors file, read as strictly as the format is defined.

A file is 8 bytes of little-endian header length, a JSON object, then the tensors' bytes:

    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...,
     "__metadata__": {"text": "text"}}

Offsets count from the end of the header. The tensors cover the rest of the file: no gap,
no overlap, nothing behind. Every size is compared with the file before memory is taken.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.pread import SourceFile

MAX_HEADER = 100_000_000
"""The format's own limit, in bytes."""
MAX_NAME = 1024
"""No tensor of any training stack has a name this long; a longer one is damage."""
MAX_RANK = 64
"""torch's limit on the dimensions of a tensor."""

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    # In the format, but nothing here reads them: such a tensor may lie in the file unread.
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C64": 64,
}
READABLE = tuple(BITS)[:15]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: where its bytes are, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file by name, and its free-form metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


class _DuplicateKeyError(ValueError):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def strict_json(text: bytes, what: str) -> Any:
    """The value of a JSON text: UTF-8, no key twice, no NaN. ``what`` begins the refusal.

    Raises:
        InputError: it is anything else, or nested too deeply to be read.
    """
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8 (byte {error.start}); it is damaged") from None
    except _DuplicateKeyError as error:
        raise InputError(f"{what} has the key {_show(error.args[0])} twice") from None
    except RecursionError:
        raise InputError(f"{what} is nested too deeply to be read") from None
    except ValueError as error:
        # Python's own words on a number of thousands of digits speak to programmers.
        said = "a number has too many digits" if "int_max_str" in str(error) else error
        raise InputError(f"{what} is not JSON: {said}") from None


def _show(name: str) -> str:
    """A name from a file as one short printable word."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:60]}...' ({len(name)} characters)"


def _refuse_other_formats(path: Path, start: bytes) -> None:
    if start.startswith(b"\x93NUMPY"):
        raise InputError(
            f"{path}: a numpy array, not a safetensors file; "
            "those are read for d2t, t2d and token counts alone, as .npy"
        )
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        raise InputError(
            f"{path}: not a safetensors file but one of torch under its name; "
            "convert it: opdtool convert FILE.pt -o FILE.safetensors"
        )


def _refuse_npz(path: Path, file: SourceFile) -> None:
    """A zip archive whose first file is an array: savez of numpy."""
    head = file.read(0, min(file.size, 300))
    if head.startswith(b"PK\x03\x04"):
        length = int.from_bytes(head[26:28], "little")
        if head[30 : 30 + length].endswith(b".npy"):
            raise InputError(
                f"{path}: a numpy archive, not a safetensors file; save its arrays as "
                "safetensors (d2t, t2d and token counts are read from one .npy each, too)"
            )


def read_header(file: SourceFile) -> Header:
    """The checked header of an open safetensors file.

    Raises:
        InputError: the file breaks the format in any way; it names the file and the reason.
    """
    path = file.path
    if file.size < 9:
        raise InputError(
            f"{path}: {plural(file.size, 'byte')}, too short for a safetensors file (at least 10 "
            "bytes)"
        )
    start = file.read(0, 9)
    length = int.from_bytes(start[:8], "little")
    # Any eight bytes are some header length: the name of another format counts only where no
    # header follows.
    if start[8:] != b"{" or length > file.size - 8:
        _refuse_npz(path, file)
        _refuse_other_formats(path, start)
    if length > file.size - 8:
        raise InputError(
            f"{path}: header length {length} is past the end of the file "
            f"({plural(file.size, 'byte')}); "
            "it is truncated or not a safetensors file"
        )
    if length > MAX_HEADER:
        raise InputError(
            f"{path}: header of {plural(length, 'byte')}; the format allows {MAX_HEADER}"
        )
    if length < 2:
        raise InputError(f"{path}: header length {length}; the shortest header is {{}}")
    text = file.read(8, length)
    if text[:1] != b"{":
        raise InputError(f"{path}: header does not begin with {{; not a safetensors file")
    with _no_collection():
        raw = strict_json(text, f"{path}: header")
        metadata = _metadata(path, raw.pop("__metadata__", {}))
        data_start = 8 + length
        entries = {
            name: _entry(path, name, value, data_start, file.size) for name, value in raw.items()
        }
        _check_cover(path, entries, data_start, file.size)
    return Header(entries, metadata)


def _metadata(path: object, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InputError(f"{path}: __metadata__ is not an object of texts")
    for key, text in value.items():
        if not isinstance(text, str):
            raise InputError(f"{path}: __metadata__[{_show(key)}] is not a text")
        if not (key + text).isascii() and _has_surrogate(key + text):
            raise InputError(f"{path}: __metadata__[{_show(key)}] is not Unicode text")
    return value


def _has_surrogate(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which no terminal or file could take."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _entry(path: object, name: str, value: Any, data_start: int, file_size: int) -> Entry:
    try:
        return _checked_entry(name, value, data_start, file_size)
    except _Fault as fault:
        raise InputError(f"{path}: tensor {_show(name)}: {fault}") from None


class _Fault(ValueError):  # noqa: N818 - it never leaves this module
    """What is wrong with one tensor's entry."""


def _checked_entry(name: str, value: Any, data_start: int, file_size: int) -> Entry:
    if not name:
        raise _Fault("its name is empty")
    if len(name) > MAX_NAME:
        raise _Fault(f"its name has {len(name)} characters, past {MAX_NAME}")
    if not name.isprintable():
        raise _Fault("its name is not printable")
    if not isinstance(value, dict):
        raise _Fault("its entry is not an object")
    try:
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    except KeyError as error:
        raise _Fault(f"its entry has no {error.args[0]}") from None
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _Fault(f"unknown dtype {_show(str(dtype))}; known: {', '.join(BITS)}")
    count = _numel(shape)
    if not _sizes(offsets) or len(offsets) != 2:
        raise _Fault("data_offsets are not two byte counts")
    begin, end = offsets
    if begin > end:
        raise _Fault(f"data_offsets are reversed ({begin} past {end})")
    if end > file_size - data_start:
        raise _Fault(
            f"data_offsets end at {end}, past the {plural(file_size - data_start, 'byte')} of "
            "data; "
            "the file is truncated"
        )
    if count * bits != (end - begin) * 8:
        raise _Fault(
            f"{plural(end - begin, 'byte')} for {dtype} {shape}, which takes "
            f"{-(-count * bits // 8)}"
        )
    return Entry(dtype, tuple(shape), data_start + begin, end - begin)


def _sizes(value: Any) -> bool:
    """Is it a list of integers in 0..2**63-1? (In JSON, true is no integer.)"""
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 - a million times over; a plain loop is the fastest
        if type(item) is not int or not 0 <= item < 1 << 63:
            return False
    return True


def _numel(shape: Any) -> int:
    if not _sizes(shape):
        raise _Fault("shape is not a list of sizes in 0..2^63-1")
    if len(shape) > MAX_RANK:
        raise _Fault(f"shape has {len(shape)} dimensions, past {MAX_RANK}")
    count, strides = 1, 1
    for size in shape:
        count *= size
        strides *= size or 1
    if strides >= 1 << 63:
        raise _Fault(f"shape {shape} has more elements than can be counted")
    return count


def _check_cover(
    path: object, entries: Mapping[str, Entry], data_start: int, file_size: int
) -> None:
    """The tensors' bytes, in order, are the whole of the file behind its header."""
    at, before = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if entry.begin != at:
            fault = "overlap" if entry.begin < at else "leave a gap after"
            neighbour = f"tensor {_show(before)}" if before else "the header"
            raise InputError(f"{path}: the bytes of tensor {_show(name)} {fault} {neighbour}")
        at, before = entry.begin + entry.nbytes, name
    if at != file_size:
        raise InputError(
            f"{path}: {plural(file_size - at, 'byte')} behind the last tensor; the file is damaged"
        )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cyclic collector, which walks a large header again and again as it grows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
