"""A corpus of broken and hostile files, each with what must be said of it.

    python tests/attacks/make_corpus.py FOLDER

writes every file and ``expected.json``. The tests write it to a temporary folder; nothing
of it is committed but this script. It knows the format from its definition and uses none
of the code that it is meant to break.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Case:
    """One file: its name, how it is written, and a part of the refusal ("" where it is fine)."""

    name: str
    write: Callable[[Path], object]
    reason: str


def raw(data: bytes) -> Callable[[Path], object]:
    """Write these bytes."""
    return lambda path: path.write_bytes(data)


def framed(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header; ``length`` says otherwise than it is."""
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """One tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def of(tensors: dict[str, Any], data: bytes = b"") -> Callable[[Path], object]:
    """Write a file whose header is this object."""
    return raw(framed(json.dumps(tensors).encode(), data))


GOOD = {"x": entry("F32", [2], 0, 8)}


def lengths() -> Iterator[Case]:
    """The eight bytes of header length, and files that are cut."""
    whole = framed(json.dumps(GOOD).encode(), b"\0" * 8)
    yield Case("empty", raw(b""), "0 bytes, too short")
    yield Case("seven-bytes", raw(b"\2\0\0\0\0\0\0"), "7 bytes, too short")
    yield Case("length-zero", raw(framed(b"", b"\0" * 8)), "header length 0")
    yield Case("length-one", raw(framed(b"{", b"}", 1)), "header length 1")
    yield Case("length-past-end", raw(framed(b"{}", length=3)), "is past the end of the file")
    yield Case("length-2-63", raw(framed(b"{}", length=1 << 63)), "is past the end of the file")
    yield Case("length-2-64", raw(framed(b"{}", length=(1 << 64) - 1)), "is past the end")
    yield Case("length-big-endian", raw((2).to_bytes(8, "big") + b"{}"), "is past the end")
    yield Case("header-cut", raw(whole[:20]), "is past the end of the file")
    yield Case("data-cut", raw(whole[:-1]), "the file is truncated")
    yield Case("data-missing", raw(whole[:-8]), "the file is truncated")
    yield Case("no-tensors", raw(framed(b"{}")), "")
    yield Case("no-tensors-padded", raw(framed(b"{}      ")), "")
    yield Case("good", raw(whole), "")


def huge() -> Iterator[Case]:
    """Sizes that would take all memory or all day."""

    def sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.write((MAX_HEADER + 1).to_bytes(8, "little") + b"{}")
            file.truncate(MAX_HEADER + 100)

    def spaces(path: Path) -> None:
        path.write_bytes(framed(b"{}" + b" " * (MAX_HEADER - 2)))

    def zeros(path: Path) -> None:
        with path.open("wb") as file:
            file.write(MAX_HEADER.to_bytes(8, "little") + b"{")
            file.truncate(MAX_HEADER + 8)

    yield Case("header-past-100-MB", sparse, "the format allows 100000000")
    yield Case("header-of-100-MB", spaces, "")
    yield Case("header-of-100-MB-of-zeros", zeros, "header is not JSON")
    exa = 1 << 60
    yield Case("shape-2-60", of({"x": entry("F32", [exa], 0, 8)}, b"\0" * 8), "which takes")
    yield Case("shape-2-63", of({"x": entry("F32", [1 << 63], 0, 8)}, b"\0" * 8), "shape is not")
    yield Case(
        "shape-overflows",
        of({"x": entry("F32", [1 << 32, 1 << 32, 2], 0, 8)}, b"\0" * 8),
        "more elements than can be counted",
    )
    yield Case(
        "shape-overflows-to-zero",
        of({"x": entry("U8", [0, 1 << 62, 1 << 62], 0, 0)}),
        "more elements than can be counted",
    )
    yield Case("offsets-2-62", of({"x": entry("U8", [1 << 62], 0, 1 << 62)}), "truncated")
    yield Case("rank-65", of({"x": entry("U8", [1] * 65, 0, 1)}, b"\0"), "65 dimensions, past 64")
    yield Case("rank-64", of({"x": entry("U8", [1] * 64, 0, 1)}, b"\0"), "")
    digits = b'{"x":{"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,1]}}'
    yield Case("integer-of-100000-digits", raw(framed(digits, b"\0")), "header is not JSON")


def texts() -> Iterator[Case]:
    """Headers that are not what they should be as text."""
    for name, header, reason in [
        ("array", b"[]", "does not begin with {"),
        ("space-first", b" {}", "does not begin with {"),
        ("zeros", b"\0\0\0\0", "does not begin with {"),
        ("bom", b"\xef\xbb\xbf{}", "does not begin with {"),
        ("unclosed", b'{"x":', "header is not JSON"),
        ("trailing", b"{}{}", "header is not JSON"),
        ("comma", b'{"a":1,}', "header is not JSON"),
        ("nan", b'{"a":NaN}', "header is not JSON"),
        ("utf-16", '{"a":1}'.encode("utf-16-le"), "header is not JSON"),
        ("not-utf-8", b'{"\xff\xfe":1}', "header is not UTF-8"),
        ("overlong-utf-8", b'{"\xc0\xaf":1}', "header is not UTF-8"),
        ("control-character", b'{"a\n":1}', "header is not JSON"),
        ("deep-arrays", b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        ("deep-objects", b'{"x":' * 200_000 + b"1" + b"}" * 200_000, "nested too deeply"),
        ("deep-unclosed", b'{"x":' * 200_000, "nested too deeply"),
    ]:
        yield Case(f"text-{name}", raw(framed(header)), reason)
    for name, magic, reason in [
        ("zip", b"PK\x03\x04", "one of torch under its name"),
        ("pickle", b"\x80\x02", "one of torch under its name"),
        ("npy", b"\x93NUMPY", "a numpy array"),
    ]:
        yield Case(f"text-{name}", raw(magic + b"\0" * 60), reason)


def names() -> Iterator[Case]:
    """Names of tensors."""
    yield Case("name-empty", of({"": entry("U8", [1], 0, 1)}, b"\0"), "its name is empty")
    for length, reason in ((1024, ""), (1025, "1025 characters, past 1024"), (10**6, "past 1024")):
        tensors = {"n" * length: entry("U8", [1], 0, 1)}
        yield Case(f"name-of-{length}", of(tensors, b"\0"), reason)
    for word, name in [
        ("escape", "a\x1b[2J"),
        ("newline", "a\nb"),
        ("nul", "a\0b"),
        ("half-surrogate", "a\ud800"),
        ("right-to-left", "a\u202eb"),
    ]:
        yield Case(f"name-{word}", of({name: entry("U8", [1], 0, 1)}, b"\0"), "is not printable")
    yield Case("name-unicode", of({"größe.重み": entry("U8", [1], 0, 1)}, b"\0"), "")
    one = b'"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    yield Case("name-twice", raw(framed(b"{" + one + b"," + one + b"}", b"\0")), "key 'x' twice")
    yield Case(
        "key-twice-in-entry",
        raw(framed(b'{"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"\0")),
        "key 'dtype' twice",
    )


def entries() -> Iterator[Case]:
    """Entries with parts missing or of wrong types."""
    for word, value, reason in [
        ("null", None, "its entry is not an object"),
        ("number", 3, "its entry is not an object"),
        ("array", [1, 2], "its entry is not an object"),
        ("empty", {}, "its entry has no dtype"),
        ("no-shape", {"dtype": "U8", "data_offsets": [0, 1]}, "its entry has no shape"),
        ("no-offsets", {"dtype": "U8", "shape": [1]}, "its entry has no data_offsets"),
        ("dtype-unknown", entry("F31", [1], 0, 1), "unknown dtype 'F31'"),
        ("dtype-lower-case", entry("f32", [1], 0, 4), "unknown dtype 'f32'"),
        ("dtype-number", entry(3, [1], 0, 1), "unknown dtype '3'"),
        ("dtype-null", entry(None, [1], 0, 1), "unknown dtype 'None'"),
        ("dtype-array", entry(["U8"], [1], 0, 1), "unknown dtype"),
        ("dtype-long", entry("U" * 10**5, [1], 0, 1), "100000 characters"),
        ("shape-null", entry("U8", None, 0, 1), "shape is not a list"),
        ("shape-number", entry("U8", 1, 0, 1), "shape is not a list"),
        ("shape-text", entry("U8", "1", 0, 1), "shape is not a list"),
        ("shape-negative", entry("U8", [-1], 0, 1), "shape is not a list"),
        ("shape-two-negatives", entry("U8", [-1, -1], 0, 1), "shape is not a list"),
        ("shape-float", entry("U8", [1.0], 0, 1), "shape is not a list"),
        ("shape-true", entry("U8", [True], 0, 1), "shape is not a list"),
        ("shape-nested", entry("U8", [[1]], 0, 1), "shape is not a list"),
        ("offsets-null", {"dtype": "U8", "shape": [1], "data_offsets": None}, "not two byte"),
        ("offsets-one", {"dtype": "U8", "shape": [1], "data_offsets": [0]}, "not two byte"),
        ("offsets-three", {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}, "not two"),
        ("offsets-negative", entry("U8", [1], -1, 0), "not two byte counts"),
        ("offsets-float", entry("U8", [1], 0, 1.0), "not two byte counts"),
        ("offsets-text", entry("U8", [1], "0", "1"), "not two byte counts"),
        ("offsets-true", entry("U8", [1], False, True), "not two byte counts"),
        ("offsets-2-64", entry("U8", [1], 0, 1 << 64), "not two byte counts"),
        ("offsets-reversed", entry("U8", [1], 1, 0), "are reversed"),
        ("offsets-past-end", entry("U8", [2], 0, 2), "past the 1 byte of data"),
        ("bytes-too-few", entry("U16", [1], 0, 1), "1 byte for U16 [1], which takes 2"),
        ("bytes-too-many", entry("U8", [0], 0, 1), "1 byte for U8 [0], which takes 0"),
        ("sub-byte-odd", entry("F4", [1], 0, 1), "1 byte for F4 [1]"),
        ("extra-key", {**entry("U8", [1], 0, 1), "note": "fine"}, ""),
    ]:
        yield Case(f"entry-{word}", of({"x": value}, b"\0"), reason)


def covers() -> Iterator[Case]:
    """Tensors that do not lie one after the other."""
    for word, spans, reason in [
        ("overlap", [(0, 4), (2, 6)], "of tensor 'b' overlap tensor 'a'"),
        ("same-bytes", [(0, 4), (0, 4)], "of tensor 'b' overlap tensor 'a'"),
        ("inside", [(0, 8), (2, 4)], "of tensor 'b' overlap tensor 'a'"),
        ("gap", [(0, 4), (5, 8)], "of tensor 'b' leave a gap after tensor 'a'"),
        ("gap-first", [(1, 4), (4, 8)], "of tensor 'a' leave a gap after the header"),
        ("behind", [(0, 4), (4, 7)], "1 byte behind the last tensor"),
        ("zero-size-inside", [(0, 8), (4, 4)], "of tensor 'b' overlap tensor 'a'"),
        ("other-order", [(4, 8), (0, 4)], ""),
        ("zero-size", [(0, 8), (8, 8)], ""),
    ]:
        tensors = {
            name: entry("U8", [end - begin], begin, end)
            for name, (begin, end) in zip("ab", spans, strict=True)
        }
        yield Case(f"cover-{word}", of(tensors, b"\0" * 8), reason)
    yield Case("cover-data-without-tensors", raw(framed(b"{}", b"\0")), "1 byte behind")


def metadata() -> Iterator[Case]:
    """The free-form part."""
    cases: list[tuple[str, Any, str]] = [
        ("null", None, "__metadata__ is not an object"),
        ("array", ["a"], "__metadata__ is not an object"),
        ("text", "a", "__metadata__ is not an object"),
        ("number-inside", {"a": 1}, "__metadata__['a'] is not a text"),
        ("null-inside", {"a": None}, "__metadata__['a'] is not a text"),
        ("object-inside", {"a": {}}, "__metadata__['a'] is not a text"),
        ("half-surrogate", {"a": "\udc00"}, "is not Unicode text"),
        ("tensor", entry("U8", [1], 0, 1), "is not a text"),
        ("fine", {"format": "pt", "größe": "é"}, ""),
    ]
    for word, value, reason in cases:
        yield Case(f"metadata-{word}", of({"__metadata__": value, **GOOD}, b"\0" * 8), reason)


def million(count: int = 10**6) -> Case:
    """A million tensors: valid, and to be read in seconds."""

    def write(path: Path) -> None:
        items = (
            f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}'
            for i in range(count)
        )
        path.write_bytes(framed(b"{" + ",".join(items).encode() + b"}", b"\1" * count))

    return Case("a-million-tensors", write, "")


def corpus() -> list[Case]:
    """Every case but the million tensors."""
    parts = (lengths(), huge(), texts(), names(), entries(), covers(), metadata())
    return [case for part in parts for case in part]


def npy(header: bytes, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """A ``.npy`` file with this header."""
    width = 2 if version == b"\1\0" else 4
    return b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header + data


def npy_corpus() -> list[Case]:
    """Broken ``.npy`` files."""

    def head(descr: str = "'<i8'", shape: str = "(1,)", order: str = "False") -> bytes:
        text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n"
        return text.encode()

    eight = b"\0" * 8
    return [
        Case("good", raw(npy(head(), eight)), ""),
        Case("version-2", raw(npy(head(), eight, b"\2\0")), ""),
        Case("empty", raw(b""), "not a .npy file"),
        Case("magic-cut", raw(b"\x93NUM"), "not a .npy file"),
        Case("version-9", raw(npy(head(), eight, b"\x09\0")), ".npy version (9, 0)"),
        Case("version-3", raw(npy(head(), eight, b"\3\0")), ".npy version (3, 0)"),
        Case("header-cut", raw(npy(head(), eight)[:20]), "not a .npy file"),
        Case("header-long", raw(npy(b" " * 60_000, eight)), "not a .npy file"),
        Case("header-code", raw(npy(b"__import__('os').abort()", eight)), "not a .npy file"),
        Case("header-list", raw(npy(b"[1, 2]", eight)), "not a .npy file"),
        Case("header-deep", raw(npy(b"(" * 9000, eight)), "not a .npy file"),
        Case("header-not-text", raw(npy(b"\xff\0\xfe", eight)), "not a .npy file"),
        Case("object", raw(npy(head("'|O'"), eight)), "pickled objects"),
        Case("structured", raw(npy(head("[('a', '<i8')]"), eight)), "cannot be read"),
        Case("object-inside", raw(npy(head("[('a', '|O')]"), eight)), "pickled objects"),
        Case("text", raw(npy(head("'<U2'"), eight)), "cannot be read"),
        Case("date", raw(npy(head("'<M8[s]'"), eight)), "cannot be read"),
        Case("long-double", raw(npy(head("'<f16'"), eight * 2)), "cannot be read"),
        Case("complex", raw(npy(head("'<c8'"), eight)), "cannot be read"),
        Case("dtype-unknown", raw(npy(head("'<q9'"), eight)), "not a .npy file"),
        Case("negative", raw(npy(head(shape="(-1,)"), eight)), "not a .npy file|is no list"),
        Case("two-negatives", raw(npy(head(shape="(-1, -1)"), eight)), "is no list"),
        Case("true", raw(npy(head(shape="(True,)"), eight)), "is no list"),
        Case("huge", raw(npy(head(shape="(4611686018427387904,)"), eight)), "counted"),
        Case("huge-zero", raw(npy(head(shape="(0, 1 << 62)"), b"")), "not a .npy file"),
        Case("zero-times-2-62", raw(npy(head(shape="(0, 4611686018427387904, 8)"))), "counted"),
        Case("rank-33", raw(npy(head(shape=str((1,) * 33)), eight)), "sizes"),
        Case("cut", raw(npy(head(shape="(2,)"), eight)), "truncated or damaged"),
        Case("behind", raw(npy(head(), eight + b"x")), "truncated or damaged"),
        Case("bool-7", raw(npy(head("'|b1'"), b"\7")), "neither 0 nor 1"),
    ]


def main(folder: Path) -> None:
    """Write the whole corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    for suffix, cases in ((".safetensors", [*corpus(), million()]), (".npy", npy_corpus())):
        for case in cases:
            case.write(folder / f"{case.name}{suffix}")
            expected[f"{case.name}{suffix}"] = case.reason
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    print(f"{len(expected)} files in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
