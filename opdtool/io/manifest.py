"""``manifest.json``: what a directory output holds and what it was made from.

It has no time stamp and no path, so that the same input gives the same bytes on every run.
A manifest is input like any other when it is read: nothing in it is believed unchecked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opdtool
from opdtool.core.errors import InputError
from opdtool.io.header import BITS
from opdtool.io.places import read_json_file
from opdtool.io.writer import WrittenFile

SCHEMA = "opdtool.manifest/1"
NAME = "manifest.json"
KINDS = ("pack", "reconstruct")

Scalar = str | int | float | bool | None
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ManifestInput:
    """A file that the output was made from: its name without directory, and its sha256.

    ``role`` says what it was to the command (``batch``, ``payload``, ``head``, ``norm``,
    ``d2t``); a head is bound to its teacher's ``index`` and to the ``tensor`` it was.
    """

    name: str
    sha256: str
    role: str = "batch"
    index: int | None = None
    tensor: str | None = None


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of the directory. ``tensors`` has (dtype, shape) by name."""

    name: str
    size: int
    sha256: str
    tensors: Mapping[str, tuple[str, Shape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All of a manifest. ``batch`` is (B, S); ``extra`` is what one kind alone records."""

    kind: str
    geometry: Mapping[str, Scalar]
    files: tuple[ManifestFile, ...]
    inputs: tuple[ManifestInput, ...] = ()
    batch: tuple[int, int] | None = None
    algorithm: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    tool_version: str = opdtool.__version__

    def file(self, name: str) -> ManifestFile:
        """The file of that name. KeyError if the manifest lists none."""
        return {file.name: file for file in self.files}[name]

    def to_json(self) -> str:
        """The text of the file: sorted keys, one trailing newline."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "tool": {"name": "opdtool", "version": self.tool_version},
            "kind": self.kind,
            "geometry": dict(self.geometry),
            "files": {
                file.name: {
                    "size": file.size,
                    "sha256": file.sha256,
                    "tensors": {
                        name: {"dtype": dtype, "shape": list(shape)}
                        for name, (dtype, shape) in file.tensors.items()
                    },
                }
                for file in self.files
            },
            "inputs": [
                {
                    key: value
                    for key, value in (
                        ("name", item.name),
                        ("sha256", item.sha256),
                        ("role", item.role),
                        ("index", item.index),
                        ("tensor", item.tensor),
                    )
                    if value is not None
                }
                for item in self.inputs
            ],
            "extra": dict(self.extra),
        }
        if self.batch is not None:
            document["batch"] = {"rows": self.batch[0], "width": self.batch[1]}
        if self.algorithm is not None:
            document["algorithm"] = self.algorithm
        return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def make_manifest(
    kind: str,
    *,
    geometry: Mapping[str, Scalar],
    files: Sequence[WrittenFile],
    inputs: Sequence[ManifestInput],
    batch: tuple[int, int] | None = None,
    algorithm: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of files that were just written."""
    return Manifest(
        kind=kind,
        geometry=geometry,
        files=tuple(
            ManifestFile(
                file.name,
                file.size,
                file.sha256,
                {spec.name: (spec.dtype, spec.shape) for spec in file.tensors},
            )
            for file in sorted(files, key=lambda file: file.name)
        ),
        inputs=tuple(inputs),
        batch=batch,
        algorithm=algorithm,
        extra=extra or {},
    )


def has_manifest(directory: Path) -> bool:
    """Is there a manifest in the directory?"""
    return (directory / NAME).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The checked manifest of a directory.

    Raises:
        InputError: there is none, it is of another schema, or it is not what
            :meth:`Manifest.to_json` writes (it names the key).
    """
    path = directory / NAME
    reader = _Reader(path)
    raw = reader.mapping(read_json_file(path), "the manifest")
    schema = raw.get("schema")
    if schema != SCHEMA:
        raise InputError(f"{path}: schema {ascii(schema)[:60]}; {SCHEMA} is expected")
    kind = reader.text(raw, "kind")
    if kind not in KINDS:
        raise InputError(f"{path}: kind {ascii(kind)[:60]}; one of {', '.join(KINDS)} is expected")
    geometry = reader.mapping(raw.get("geometry"), "geometry")
    for key, value in geometry.items():
        if not (value is None or isinstance(value, (str, int, float))):
            raise InputError(f"{path}: geometry.{ascii(key)[:60]} is not a plain value")
    batch = raw.get("batch")
    if batch is not None:
        batch = reader.mapping(batch, "batch")
        batch = (reader.count(batch, "rows"), reader.count(batch, "width"))
    return Manifest(
        kind=kind,
        geometry=geometry,
        files=reader.files(raw.get("files")),
        inputs=reader.inputs(raw.get("inputs", [])),
        batch=batch,
        algorithm=reader.text(raw, "algorithm") if raw.get("algorithm") is not None else None,
        extra=reader.mapping(raw.get("extra", {}), "extra"),
        tool_version=reader.text(reader.mapping(raw.get("tool"), "tool"), "version"),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values that must have a type; ``path`` begins every refusal."""

    path: Path

    def mapping(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: {what} is not a JSON object; it is damaged")
        return value

    def text(self, holder: Mapping[str, Any], key: str) -> str:
        value = holder.get(key)
        if not isinstance(value, str) or not value.isprintable():
            raise InputError(f"{self.path}: {key} is {ascii(value)[:60]}; a text is expected")
        return value

    def any_text(self, holder: Mapping[str, Any], key: str) -> str:
        """A text of any letters: a file that was read may have any name that a system allows."""
        value = holder.get(key)
        if not isinstance(value, str):
            raise InputError(f"{self.path}: {key} is {ascii(value)[:60]}; a text is expected")
        return value

    def index(self, holder: Mapping[str, Any]) -> int:
        """The index of a teacher, which may be negative."""
        value = holder.get("index")
        if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
            raise InputError(f"{self.path}: index is {ascii(value)[:60]}; a number is expected")
        return value

    def count(self, holder: Mapping[str, Any], key: str) -> int:
        value = holder.get(key)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise InputError(f"{self.path}: {key} is {ascii(value)[:60]}; a count is expected")
        return value

    def sha256(self, holder: Mapping[str, Any]) -> str:
        value = self.text(holder, "sha256")
        if not re.fullmatch("[0-9a-f]{64}", value):
            raise InputError(f"{self.path}: sha256 {value[:80]} is not 64 hexadecimal digits")
        return value

    def name(self, name: str) -> str:
        """A plain file name: nothing that could lead out of the directory."""
        if not name or not name.isprintable() or {"/", "\\"} & set(name) or name in (".", ".."):
            raise InputError(
                f"{self.path}: file name {ascii(name)[:80]} is not the name of a file beside it"
            )
        return name

    def files(self, value: Any) -> tuple[ManifestFile, ...]:
        found = []
        for name, raw in self.mapping(value, "files").items():
            item = self.mapping(raw, f"files[{ascii(name)[:60]}]")
            tensors = self.mapping(item.get("tensors"), f"files[{ascii(name)[:60]}].tensors")
            found.append(
                ManifestFile(
                    self.name(name),
                    self.count(item, "size"),
                    self.sha256(item),
                    {key: self.tensor(key, entry) for key, entry in tensors.items()},
                )
            )
        return tuple(sorted(found, key=lambda file: file.name))

    def tensor(self, name: str, value: Any) -> tuple[str, Shape]:
        entry = self.mapping(value, f"the tensor {ascii(name)[:60]}")
        dtype, shape = self.text(entry, "dtype"), entry.get("shape")
        if dtype not in BITS:
            raise InputError(f"{self.path}: dtype {ascii(dtype)[:60]} of {ascii(name)[:60]}")
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise InputError(f"{self.path}: shape of {ascii(name)[:60]} is not a list of sizes")
        return dtype, tuple(shape)

    def inputs(self, value: Any) -> tuple[ManifestInput, ...]:
        if not isinstance(value, list):
            raise InputError(f"{self.path}: inputs is not a list; it is damaged")
        found = []
        for raw in value:
            item = self.mapping(raw, "an input")
            found.append(
                ManifestInput(
                    self.any_text(item, "name"),
                    self.sha256(item),
                    self.text(item, "role"),
                    self.index(item) if "index" in item else None,
                    self.text(item, "tensor") if "tensor" in item else None,
                )
            )
        return tuple(found)
