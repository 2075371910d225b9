"""Whatever the bytes, every reader succeeds or refuses: never a crash, never another error.

Valid files are bent: bits flipped, pieces cut, doubled and moved, numbers replaced by those at
the edges, JSON values by others. ``make fuzz`` goes on for longer (OPDTOOL_FUZZ_SECONDS).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from opdtool.cli import defaults, rescale
from opdtool.cli.start import COMMANDS
from opdtool.cli.suite import expand, read_suite
from opdtool.core.errors import InputError
from opdtool.io.batch import open_batch
from opdtool.io.checkpoints import find_head, find_norm, norm_eps, open_checkpoint, open_draft
from opdtool.io.convert import convert
from opdtool.io.header import READABLE
from opdtool.io.manifest import make_manifest, read_manifest
from opdtool.io.npy import read_npy
from opdtool.io.outdir import OutputDir
from opdtool.io.tensors import open_tensors
from opdtool.io.verify import verify_files

EDGES = [0, 1, 2, 7, 8, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64]
SECONDS = float(os.environ.get("OPDTOOL_FUZZ_SECONDS", "40"))


class Folder:
    """A folder of this process, emptied for every example."""

    def __init__(self) -> None:
        self.path = Path(os.environ.get("TMPDIR", "/tmp")) / f"opdtool-fuzz-{os.getpid()}"

    def fresh(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        return self.path


FOLDER = Folder()


@pytest.fixture(autouse=True, scope="module")
def _clean() -> Any:
    yield
    shutil.rmtree(FOLDER.path, ignore_errors=True)


# What is bent.


def batch_file() -> bytes:
    """A small batch."""
    return save(
        {
            "input_ids": torch.arange(6).reshape(2, 3),
            "input_lengths": torch.tensor([3, 1], dtype=torch.int32),
            "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
            "token_mask": torch.ones(2, 3, dtype=torch.bfloat16),
            "sample_mask": torch.tensor([True, False]),
        },
        metadata={"format": "pt"},
    )


def manifest_file() -> bytes:
    """A small manifest."""
    folder = FOLDER.fresh()
    with OutputDir(folder / "out") as out:
        out.save_tensors("a.safetensors", {"x": torch.ones(2)})
        manifest = make_manifest(
            "pack", geometry={"cp": 1}, files=out.files, inputs=[], batch=(1, 2), algorithm="bfd"
        )
    return manifest.to_json().encode()


def npy_file() -> bytes:
    """A small array."""
    stream = io.BytesIO()
    np.save(stream, np.arange(6).reshape(2, 3))
    return stream.getvalue()


def torch_file() -> bytes:
    """A small torch file of the old kind, which is one plain pickle after the other."""
    stream = io.BytesIO()
    torch.save({"x": torch.arange(3)}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


INDEX = json.dumps(
    {"metadata": {"total_size": 3}, "weight_map": {"lm_head.weight": "a.safetensors"}}
).encode()
CONFIG = json.dumps(
    {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 8,
        "draft_vocab_size": 2,
        "text_config": {"vocab_size": 8},
    }
).encode()

SUITE = {
    "continue_on_failure": True,
    "defaults": {"batch": "batch.safetensors", "atol": 0.0},
    "matrix": {"cp": [1, 2]},
    "step": [
        {"name": "mask", "command": "verify-mask", "inputs": ["m{cp}.safetensors"]},
        {"command": "roll", "name": "ids", "inputs": ["p"], "output": "o", "force": False},
    ],
}
DEFAULTS = {
    "format": "concise",
    "max-memory": "1GiB",
    "must-include": [1, 2],
    "verify-mask": {"cp": 2, "sequence-parallel": False, "batch": ["b.safetensors"]},
}
METRICS = {"kl": 1.5, "count": 3, "by_step": [1, 2.5, 1e300]}
NORMALIZERS = {"kl": "tokens", "count": "sequences", "by_step": "none"}


def as_toml(value: Any, top: bool = True) -> str:
    """A JSON value as TOML: tables in one line but for the outermost. There is no null."""
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)} = {as_toml(item, top=False)}" for key, item in value.items()]
        return "\n".join(pairs) + "\n" if top else "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(item, top=False) for item in value) + "]"
    if (isinstance(value, float) and value != value) or value in (float("inf"), -float("inf")):
        return str(value)
    return "nan" if value is None else json.dumps(value)


# Who reads it.


def read_tensors(data: bytes) -> None:
    path = FOLDER.fresh() / "a.safetensors"
    path.write_bytes(data)
    with open_tensors(path) as source:
        for name in source.names():
            source.read(name)
            source.metadata()


def read_batch(data: bytes) -> None:
    path = FOLDER.fresh() / "a.safetensors"
    path.write_bytes(data)
    with open_batch(path) as batch:
        assert ((batch.lengths >= 0) & (batch.lengths <= batch.width)).all()
        batch.sample_mask()
        if "token_mask" in batch:
            batch.token_mask()
        batch.refuse_others()


def read_manifests(data: bytes) -> None:
    folder = FOLDER.fresh()
    (folder / "manifest.json").write_bytes(data)
    manifest = read_manifest(folder)
    for file in manifest.files:
        assert (folder / file.name).resolve().parent == folder.resolve()
    verify_files(folder, manifest)
    json.loads(manifest.to_json())


def read_arrays(data: bytes) -> None:
    path = FOLDER.fresh() / "a.npy"
    path.write_bytes(data)
    read_npy(path)
    open_draft(path)


def read_index(data: bytes) -> None:
    folder = FOLDER.fresh()
    (folder / "model.safetensors.index.json").write_bytes(data)
    (folder / "a.safetensors").write_bytes(save({"lm_head.weight": torch.ones(2, 2)}))
    with open_tensors(folder) as source:
        assert all(path.resolve().is_relative_to(folder.resolve()) for path in source.paths)
        for name in source.names():
            source.read(name)


def read_config(data: bytes) -> None:
    folder = FOLDER.fresh()
    (folder / "config.json").write_bytes(data)
    tensors = {"model.embed_tokens.weight": torch.ones(2, 2), "d2t": torch.zeros(2)}
    (folder / "model.safetensors").write_bytes(save(tensors))
    with open_checkpoint(folder) as checkpoint:
        find_norm(checkpoint)
        norm_eps(checkpoint)
        checkpoint.size("vocab_size")
        find_head(checkpoint)
    open_draft(folder)


def read_torch(data: bytes) -> None:
    path = FOLDER.fresh() / "a.pt"
    path.write_bytes(data)
    convert(path, path.with_name("out.safetensors"))


def read_suites(data: bytes) -> None:
    path = FOLDER.fresh() / "suite.toml"
    path.write_bytes(data)
    for step in read_suite(path):
        assert step.name.isprintable()
        line = expand(step, path.parent)
        assert line[0] in COMMANDS
        assert all(isinstance(word, str) for word in line)


def read_defaults(data: bytes, name: str = "opdtool.toml") -> None:
    path = FOLDER.fresh() / name
    path.write_bytes(data)
    config = defaults.read_config(path)
    for command in ("verify-mask", "pack", "build-d2t"):
        defaults.defaults_for(config, command, COMMANDS)


def read_pyproject(data: bytes) -> None:
    read_defaults(data, "pyproject.toml")


def read_metrics(data: bytes) -> None:
    path = FOLDER.fresh() / "metrics.json"
    path.write_bytes(data)
    values = rescale._metrics(str(path))
    try:
        made = rescale.rescaled(values, NORMALIZERS, 0.5, 1e10)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    assert list(made) == list(values)
    json.dumps(made, allow_nan=False)


def read_normalizers(data: bytes) -> None:
    path = FOLDER.fresh() / "normalizers.json"
    path.write_bytes(data)
    kinds = rescale._normalizers(str(path))
    assert set(kinds.values()) <= set(rescale.KINDS)


READERS: dict[str, tuple[Callable[[bytes], None], Callable[[], bytes]]] = {
    "safetensors": (read_tensors, batch_file),
    "batch": (read_batch, batch_file),
    "manifest": (read_manifests, manifest_file),
    "npy": (read_arrays, npy_file),
    "index": (read_index, lambda: INDEX),
    "config": (read_config, lambda: CONFIG),
    "torch": (read_torch, torch_file),
    "suite": (read_suites, lambda: as_toml(SUITE).encode()),
    "defaults": (read_defaults, lambda: as_toml(DEFAULTS).encode()),
    "pyproject": (read_pyproject, lambda: as_toml({"tool": {"opdtool": DEFAULTS}}).encode()),
    "metrics": (read_metrics, lambda: json.dumps(METRICS).encode()),
    "normalizers": (read_normalizers, lambda: json.dumps(NORMALIZERS).encode()),
}
DOCUMENTS = {"suite": SUITE, "defaults": DEFAULTS, "pyproject": {"tool": {"opdtool": DEFAULTS}}}
"""What the TOML files say."""


# How it is bent.


@st.composite
def bent(draw: st.DrawFn, valid: bytes) -> bytes:
    """The bytes with a few changes."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "set", "cut", "drop", "insert", "double", "number"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and data:
            data[at] = draw(st.sampled_from(b'\0\xff\x7f\x80 "{}[],:-.019eE'))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 16))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 32))]
        else:
            data[at : at + 8] = (draw(st.sampled_from(EDGES)) % 2**64).to_bytes(8, "little")
    return bytes(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(EDGES)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["../x", "/etc/passwd", "a.safetensors", *READABLE]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths_of(value: Any) -> list[tuple[Any, ...]]:
    """The way to every part of a JSON value."""
    found: list[tuple[Any, ...]] = [()]
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        found += [(key, *rest) for rest in paths_of(item)]
    return found


@st.composite
def other_document(draw: st.DrawFn, document: Any) -> Any:
    """The document with some of its parts replaced, removed or added."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(document)))
        value = draw(JSON)
        if not path:
            document = value if draw(st.integers(0, 9)) == 0 else document
            continue
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        kind = draw(st.sampled_from(["set", "set", "remove", "add"]))
        if kind == "remove":
            del holder[path[-1]]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = value
        else:
            holder[path[-1]] = value
    return document


@st.composite
def other_json(draw: st.DrawFn, document: Any) -> bytes:
    """The same as JSON."""
    return json.dumps(draw(other_document(document))).encode("utf-8", "surrogatepass")


@st.composite
def other_toml(draw: st.DrawFn, document: Any) -> bytes:
    """The same as TOML."""
    return as_toml(draw(other_document(document))).encode("utf-8", "surrogatepass")


@st.composite
def other_header(draw: st.DrawFn, valid: bytes) -> bytes:
    """A safetensors file whose header's JSON was changed."""
    length = int.from_bytes(valid[:8], "little")
    header = draw(other_json(json.loads(valid[8 : 8 + length])))
    return len(header).to_bytes(8, "little") + header + valid[8 + length :]


def strategy(name: str) -> st.SearchStrategy[bytes]:
    """All ways of bending what a reader reads, and bytes out of nowhere."""
    valid = READERS[name][1]()
    ways = [bent(valid), st.binary(max_size=64)]
    if name in ("safetensors", "batch"):
        ways += [other_header(valid), other_header(valid)]
    elif name in DOCUMENTS:
        ways += [other_toml(DOCUMENTS[name]), other_toml(DOCUMENTS[name])]
    elif name not in ("npy", "torch"):
        ways += [other_json(json.loads(valid)), other_json(json.loads(valid))]
    return st.one_of(ways)


def survives(name: str, examples: int, *, same: bool) -> tuple[int, int]:
    """Run a reader over many inputs; returns how many it took and how many it refused.

    The inputs are the ``same`` on every call, or others.
    """
    reader, counts = READERS[name][0], [0, 0]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=same,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy(name))
    def run(data: bytes) -> None:
        try:
            reader(data)
            counts[0] += 1
        except InputError as error:
            counts[1] += 1
            message = str(error)
            assert message.isprintable(), message
            assert FOLDER.path.name in message, message
            assert len(message) < 2000, len(message)

    run()
    return counts[0], counts[1]


@pytest.mark.parametrize("name", READERS)
def test_the_file_that_is_bent_is_read(name: str) -> None:
    reader, valid = READERS[name]
    reader(valid())


@pytest.mark.parametrize("name", READERS)
def test_a_reader_succeeds_or_refuses(name: str) -> None:
    _, refused = survives(name, 60, same=True)
    assert refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_reader_succeeds_or_refuses_for_a_long_time(name: str) -> None:
    end = time.monotonic() + SECONDS / len(READERS)
    taken, refused = 0, 0
    while time.monotonic() < end:
        good, bad = survives(name, 400, same=False)
        taken, refused = taken + good, refused + bad
    assert taken + refused > 100
    assert refused > 10
