"""Finding the tensors that ``opdtool reconstruct`` names: heads, norms, and logits in shards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.io.batch import Batch
from opdtool.io.checkpoints import (
    HEAD,
    NORMS,
    Checkpoint,
    HeadSpec,
    find_head,
    find_norm,
    norm_eps,
    open_checkpoint,
    require_norm,
)
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.jobs.reconstruct.plan import HeadAt, NormAt, Sharded, TensorAt

DEFAULT_EPS = 1e-6
"""Of a norm that only a diagnosis tries, where no configuration says its epsilon."""
ONE_PLUS_WEIGHT = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
"""Models whose norms multiply by 1 + weight."""
_PART = re.compile(r"\.(tp|cp)(\d+)of(\d+)(?=\.)")


def tensor_at(source: TensorSource, name: str) -> TensorAt:
    """Where a tensor of an open source is stored."""
    info = source.info(name)
    return TensorAt(
        path=source.path_of(name),
        name=source.original_name(name),
        shape=info.shape,
        dtype=info.torch_dtype,
    )


def find_heads(
    specs: Sequence[HeadSpec],
    norms: Mapping[int, HeadSpec],
    *,
    eps: float | None,
    offset: float,
    rename: Mapping[str, str],
    used: set[str],
) -> dict[int, HeadAt]:
    """Every head with its norms, by teacher. A head or norm without a key of its own may be
    renamed; renames that were found are added to ``used``.

    Raises:
        InputError: a tensor that is not there, or a norm for a teacher that has no head.
    """
    heads: dict[int, HeadAt] = {}
    for spec in specs:
        with open_checkpoint(spec.path) as checkpoint:
            name = find_head(checkpoint, _key(checkpoint, spec, HEAD, rename, used))
            weight = tensor_at(checkpoint.source, name)
            beside = _beside(checkpoint, weight, eps, offset)
        heads[spec.index] = HeadAt(index=spec.index, weight=weight, beside=beside)
    for index, spec in norms.items():
        if index not in heads:
            loaded = ", ".join(str(i) for i in sorted(heads))
            raise InputError(
                f"--norm is given for teacher {index}, which has no --head (heads: {loaded}); "
                f"write --norm INDEX=PATH with the index of its head"
            )
        with open_checkpoint(spec.path) as checkpoint:
            key = _key(checkpoint, spec, NORMS[0], rename, used)
            found = _norm(checkpoint, require_norm(checkpoint, key), eps, offset)
        head = heads[index]
        heads[index] = HeadAt(index=index, weight=head.weight, norm=found, beside=head.beside)
    return heads


def _key(
    checkpoint: Checkpoint,
    spec: HeadSpec,
    canonical: str,
    rename: Mapping[str, str],
    used: set[str],
) -> str | None:
    """The tensor to take: the one that is named with the path, else what a rename says."""
    theirs = rename.get(canonical)
    if spec.key is not None or theirs is None or theirs not in checkpoint.source:
        return spec.key
    used.add(canonical)
    return theirs


@contextmanager
def naming(*what: object) -> Iterator[None]:
    """Say which file a refusal is about, where what refuses knows of none."""
    try:
        yield
    except InputError as error:
        named = ", ".join(dict.fromkeys(str(one) for one in what[:4]))
        raise InputError(f"{named}: {error}") from error


def _norm(checkpoint: Checkpoint, name: str, eps: float | None, offset: float) -> NormAt:
    weight = tensor_at(checkpoint.source, name)
    found = eps if eps is not None else norm_eps(checkpoint)
    if found is None:
        raise InputError(
            f"{checkpoint.path}: no config.json beside it says rms_norm_eps; pass --norm-eps"
        )
    if len(weight.shape) != 1:
        raise InputError(f"{weight.path}: {name} has shape {list(weight.shape)}; expected [H]")
    return NormAt(weight=weight, eps=found, offset=offset)


def _beside(
    checkpoint: Checkpoint, head: TensorAt, eps: float | None, offset: float
) -> NormAt | None:
    """The norm that lies beside a head, which nobody asked for and a diagnosis may try: None
    where it cannot be the final norm of that head's model."""
    name = find_norm(checkpoint)
    if name is None:
        return None
    weight = tensor_at(checkpoint.source, name)
    if weight.shape != head.shape[1:] or not weight.dtype.is_floating_point:
        return None
    try:
        found = eps if eps is not None else norm_eps(checkpoint)
    except InputError:  # of a model that no norm is applied for
        found = None
    if not offset and str(checkpoint.setting("model_type")) in ONE_PLUS_WEIGHT:
        offset = 1.0
    return NormAt(weight=weight, eps=found if found is not None else DEFAULT_EPS, offset=offset)


def shard_sizes(
    tp: int | None, cp: int | None, reference: Sequence[Path], student: Sequence[Path]
) -> tuple[int, int]:
    """(TP, CP): as asked for, else as the names of the shards say, else 1.

    Raises:
        InputError: shards that contradict what was asked for, or each other.
    """
    sizes: list[int | None] = [tp, cp]
    for what, paths in (("--reference", reference), ("--student", student)):
        for file in _files(paths, what):
            for axis, (_, own) in enumerate(_parts(file)):
                if own > 1 and sizes[axis] not in (None, own):
                    name = ("tp", "cp")[axis]
                    raise InputError(
                        f"{what} {file} is cut for {name.upper()} {own}, which contradicts "
                        f"{name.upper()} {sizes[axis]}; pass --{name} {own}"
                    )
                sizes[axis] = own if own > 1 else sizes[axis]
    return sizes[0] or 1, sizes[1] or 1


def find_sharded(
    paths: Sequence[Path],
    what: str,
    names: Sequence[str],
    rename: Mapping[str, str],
    used: set[str],
) -> Sharded:
    """Logits in one file, or in shards ``NAME.tp0of2.cp1of2.safetensors`` of them.

    ``paths`` are files, or directories of them; ``names`` the canonical names that the tensor may
    have. Renames that were found are added to ``used``.

    Raises:
        InputError: no such tensor, shards that do not make a whole, or that disagree.
    """
    files = _files(paths, what)
    places: dict[tuple[int, int], TensorAt] = {}
    sizes: tuple[int, int] | None = None
    for file in files:
        (tp, tp_size), (cp, cp_size) = _parts(file)
        if sizes is None:
            sizes = (tp_size, cp_size)
        if sizes != (tp_size, cp_size):
            raise InputError(
                f"{what} {file} is a shard of TP {tp_size} x CP {cp_size}, but {files[0]} of "
                f"TP {sizes[0]} x CP {sizes[1]}; give the shards of one run"
            )
        if (tp, cp) in places:
            raise InputError(
                f"{what} {file} and {places[tp, cp].path} are both the shard of TP rank {tp}, CP "
                f"rank {cp}; give one file a rank, named like NAME.tp0of2.cp1of2.safetensors"
            )
        places[tp, cp] = _logits(file, what, names, rename, used)
    assert sizes is not None
    missing = [(t, c) for t in range(sizes[0]) for c in range(sizes[1]) if (t, c) not in places]
    if missing:
        t, c = missing[0]
        raise InputError(
            f"{what} lacks {len(missing)} of {sizes[0] * sizes[1]} shards, the first that of TP "
            f"rank {t}, CP rank {c}, beside {files[0]}; give every rank's file"
        )
    first = places[0, 0]
    for at in places.values():
        if at.dtype != first.dtype or at.shape[:2] != first.shape[:2]:
            raise InputError(
                f"{what} {at.path} holds {at.dtype} {list(at.shape)}, but {first.path} "
                f"{first.dtype} {list(first.shape)}; shards agree in all but their columns"
            )
    widths = [places[t, 0].shape[2] for t in range(sizes[0])]
    for (t, _), at in places.items():
        if at.shape[2] != widths[t]:
            raise InputError(
                f"{what} {at.path} has {plural(at.shape[2], 'column')}, but {places[t, 0].path}, "
                "the same "
                f"shard of the vocabulary, {widths[t]}"
            )
    starts = np.cumsum([0, *widths]).tolist()
    return Sharded(
        what=what, files=places, tp_size=sizes[0], cp_size=sizes[1], starts=tuple(starts)
    )


def _files(paths: Sequence[Path], what: str) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("*.safetensors"))
            if not inside:
                raise InputError(f"{what} {path} is a directory without *.safetensors files")
            files += inside
        else:
            files.append(path)
    return files


def _parts(file: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """((tp rank, size), (cp rank, size)) from the name; (0, 1) where it says nothing."""
    found = {"tp": (0, 1), "cp": (0, 1)}
    for axis, rank, size in _PART.findall(file.name):
        if len(size) > 6 or not int(rank) < int(size):
            raise InputError(f"{file} names {axis} rank {rank} of {size}; ranks count from 0")
        found[axis] = (int(rank), int(size))
    return found["tp"], found["cp"]


def _logits(
    file: Path, what: str, names: Sequence[str], rename: Mapping[str, str], used: set[str]
) -> TensorAt:
    mine = {canonical: theirs for canonical, theirs in rename.items() if canonical in names}
    with open_tensors([file], rename=mine, strict_rename=False) as source:
        used.update(source.used_renames)
        here = [name for name in names if name in source]
        if len(here) != 1:
            listed = ", ".join(source.names()[:8]) or "nothing"
            raise InputError(
                f"{what} {file} holds {'both' if here else 'neither'} {' and '.join(names)}"
                f" (there: {listed}); choose with --rename {names[0]}=NAME"
                if len(names) > 1
                else f"{what} {file} holds no {names[0]} (there: {listed}); "
                f"--rename {names[0]}=NAME says what it is called"
            )
        at = tensor_at(source, here[0])
    if len(at.shape) != 3 or not at.dtype.is_floating_point or at.dtype.itemsize == 1:
        raise InputError(
            f"{what} {file}: {at.name} is {str(at.dtype).removeprefix('torch.')} "
            f"{list(at.shape)}; expected float logits [B, S, V]"
        )
    return at


def meta(at: TensorAt) -> torch.Tensor:
    """A tensor of that shape and dtype without data, for checks that look at no values."""
    return torch.empty(at.shape, dtype=at.dtype, device="meta")


def integers(source: TensorSource | Batch, name: str) -> torch.Tensor:
    """A stored tensor of integers as int64.

    Raises:
        InputError: it holds none.
    """
    info = source.info(name)
    dtype = info.torch_dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        where = source.paths[0] if info.path is None else info.path
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"{where}: {name} is {kind}; expected integers")
    return source.read(name).to(torch.int64)
