"""Writing safetensors, streaming: any part of any tensor at any time, complete or absent.

The header is known before the first byte of data, so the file gets its full size at once
and every block is written where it belongs. Same tensors, same bytes: the order in the
file is by alignment (widest first), then by name, whatever the order of the writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.atomic import Target, check_output, undisturbed, write_text_atomic, writing
from opdtool.io.background import workers
from opdtool.io.header import BITS
from opdtool.io.tensors import TORCH_DTYPES

__all__ = [
    "TensorFileWriter",
    "TensorSpec",
    "WrittenFile",
    "check_output",
    "dtype_code",
    "save_tensors",
    "spec_of",
    "write_text_atomic",
]

_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}
_HASH_STEP = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: name, dtype as the format spells it, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        count = BITS[self.dtype] // 8
        for size in self.shape:
            count *= size
        return count


def dtype_code(dtype: torch.dtype) -> str:
    """The format's word for a torch dtype, such as ``BF16``.

    Raises:
        InputError: safetensors has none for it.
    """
    if dtype not in _CODES:
        raise InputError(f"{dtype} cannot be written to safetensors; convert it first")
    return _CODES[dtype]


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec that a tensor fills whole."""
    return TensorSpec(name, dtype_code(tensor.dtype), tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file. Its hash is computed in a thread; ``sha256`` waits for it."""

    name: str
    size: int
    tensors: tuple[TensorSpec, ...]
    digest: Future[str]

    @property
    def sha256(self) -> str:
        """Of all its bytes, in hexadecimal."""
        return self.digest.result()

    def to_record(self) -> dict[str, Any]:
        """Plain values, to send to another process."""
        tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors]
        return {"name": self.name, "size": self.size, "sha256": self.sha256, "tensors": tensors}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> WrittenFile:
        """What :meth:`to_record` sent."""
        digest: Future[str] = Future()
        digest.set_result(record["sha256"])
        tensors = tuple(TensorSpec(n, d, tuple(shape)) for n, d, shape in record["tensors"])
        return cls(record["name"], record["size"], tensors, digest)


def build_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of the file, and where in the file each tensor begins."""
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"two tensors of one name among {sorted(names)}")
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(sorted(metadata.items()))
    at = 0
    begins = {}
    for spec in sorted(specs, key=lambda spec: (-BITS[spec.dtype], spec.name)):
        begins[spec.name] = at
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text) + 8
    return len(text).to_bytes(8, "little") + text, {n: start + b for n, b in begins.items()}


class TensorFileWriter:
    """A safetensors file under construction.

    As a context manager it is finished on leaving, or removed when an error leaves it.
    Writes may come from several threads.

    Raises:
        InputError: the output is in the way or cannot be written; a disk that fills up.
    """

    def __init__(
        self,
        path: Path | str,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        force: bool = False,
        working: Path | None = None,
        shared: bool = False,
    ) -> None:
        """``working``: where to write when a directory around it is itself being built.

        ``shared``: several processes write parts of one file, each through a writer of its
        own with the same specs. None of them hashes it, or knows whether it is whole: see
        :func:`seal`.
        """
        self._target = None if working else Target(path, force=force, directory=False)
        self.path = Path(path)
        self._working = self._target.temporary if self._target else working or self.path
        self._specs = {spec.name: spec for spec in specs}
        self._fd = -1
        self._lock = threading.Lock()
        self._missing = {spec.name: spec.nbytes for spec in specs}
        self._shared = shared
        self.result: WrittenFile | None = None
        try:
            header, self._begin = build_header(specs, metadata)
            self.size = len(header) + sum(spec.nbytes for spec in specs)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with writing(self.path):
                flags |= 0 if shared else os.O_EXCL
                self._fd = os.open(self._working, flags, 0o666)
                os.ftruncate(self._fd, self.size)
            self._put(memoryview(header), 0)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, block: Tensor, *start: int) -> None:
        """Put ``block`` where its first element is ``tensor[start]`` (missing indices are 0).

        ``block`` has the dtype and the number of dimensions of the tensor. What is written
        twice must be the same: the file is complete when as many bytes have come as it has.
        """
        spec = self._specs[name]
        if spec_of(name, block).dtype != spec.dtype or block.ndim != len(spec.shape):
            raise ValueError(f"{name}: {block.dtype} {list(block.shape)} into {spec}")
        at = [*start, *[0] * (block.ndim - len(start))]
        ends = [first + extent for first, extent in zip(at, block.shape, strict=True)]
        if any(a < 0 or end > size for a, end, size in zip(at, ends, spec.shape, strict=True)):
            raise ValueError(f"{name}: {list(block.shape)} at {at} of {list(spec.shape)}")
        if block.numel() == 0:
            return
        raw = block.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        itemsize = block.element_size()
        strides = [itemsize] * block.ndim
        for dim in range(block.ndim - 2, -1, -1):
            strides[dim] = strides[dim + 1] * spec.shape[dim + 1]
        place = self._begin[name] + sum(a * s for a, s in zip(at, strides, strict=True))
        for shift, piece in _runs(raw, block.shape, spec.shape, strides, itemsize):
            self._put(piece, place + shift)
        with self._lock:
            self._missing[name] -= raw.nbytes

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that a tensor of the file will have."""
        return self._specs[name].shape

    def leave_zero(self, name: str, elements: int) -> None:
        """Count ``elements`` of a tensor as written: they stay zero, as a new file is."""
        with self._lock:
            self._missing[name] -= elements * (BITS[self._specs[name].dtype] // 8)

    def _put(self, data: memoryview, offset: int) -> None:
        done = 0
        with writing(self.path):
            while done < data.nbytes:
                done += os.pwrite(self._fd, data[done : done + (1 << 30)], offset + done)

    @property
    def written(self) -> int:
        """How many bytes of tensors have come so far."""
        return sum(spec.nbytes for spec in self._specs.values()) - sum(self._missing.values())

    def finish(self) -> WrittenFile:
        """Give the file its name. The hash goes on being computed."""
        if self.result is not None:
            return self.result
        lacking = {name: count for name, count in self._missing.items() if count}
        if lacking:
            self.abort()
            raise RuntimeError(f"{self.path}: not written whole: {lacking} bytes are missing")
        digest = workers().submit(_sync_and_hash, self.path, self._fd, self.size)
        self._fd = -1  # the thread closes it
        specs = tuple(self._specs[name] for name in sorted(self._specs))
        result = WrittenFile(self.path.name, self.size, specs, digest)
        if self._target is not None:
            try:
                with writing(self.path):
                    digest.result()  # durable before it has the name
                self._target.move_in()
            finally:
                self._target.release()
        self.result = result
        return result

    def abort(self) -> None:
        """Remove what was written. After :meth:`finish` there is nothing to do."""
        if self.result is not None:
            return
        with undisturbed():
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            if self._target is not None:
                self._target.release()
            elif fd >= 0 and not self._shared:
                with contextlib.suppress(OSError):
                    os.unlink(self._working)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._shared:
            with writing(self.path):
                os.fsync(self._fd)
            self.abort()
        elif kind is None:
            self.finish()
        else:
            self.abort()


def seal(working: Path, specs: Sequence[TensorSpec], written: int) -> WrittenFile:
    """A file that several shared writers have filled, once all are done: its size and hash.

    ``written`` is the sum of what they say they wrote; a file that is not whole is refused.
    """
    header, _ = build_header(specs, None)
    nbytes = sum(spec.nbytes for spec in specs)
    with writing(working):
        fd = os.open(working, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    size = os.fstat(fd).st_size
    if written != nbytes or size != len(header) + nbytes:
        os.close(fd)
        raise RuntimeError(f"{working}: not written whole: {plural(written, 'byte')} of {nbytes}")
    digest = workers().submit(_sync_and_hash, working, fd, size)
    return WrittenFile(working.name, size, tuple(sorted(specs, key=lambda spec: spec.name)), digest)


def _runs(
    raw: np.ndarray,
    block: Sequence[int],
    whole: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
) -> list[tuple[int, memoryview]] | itertools.starmap[tuple[int, memoryview]]:
    """The contiguous pieces of a block: distance from its first byte in the file, and bytes."""
    inner, run = len(block), itemsize
    while inner > 0:
        inner -= 1
        run *= block[inner]
        if block[inner] != whole[inner]:
            break
    outer = [range(0, block[d] * strides[d], strides[d]) for d in range(inner)]
    pieces = raw.reshape(-1, run)
    return itertools.starmap(
        lambda index, shifts: (sum(shifts), pieces[index].data),
        enumerate(itertools.product(*outer)),
    )


def _sync_and_hash(path: Path, fd: int, size: int) -> str:
    """The sha256 of an open file, read back from the page cache, and its data made durable.

    A disk that is found to be full only now is said of ``path``, wherever the hash is asked for.
    """
    try:
        with writing(path):
            digest, at = hashlib.sha256(), 0
            buffer = memoryview(bytearray(min(_HASH_STEP, max(size, 1))))
            while at < size:
                count = os.preadv(fd, [buffer[: size - at]], at)
                if count == 0:
                    raise OSError("the file was truncated while it was written")
                digest.update(buffer[:count])
                at += count
            os.fsync(fd)
        return digest.hexdigest()
    finally:
        os.close(fd)


def save_tensors(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> WrittenFile:
    """Write tensors that are in memory to one file.

    Raises:
        InputError: the output exists (without ``force``) or cannot be written.
    """
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    with TensorFileWriter(path, specs, metadata=metadata, force=force) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return writer.finish()
