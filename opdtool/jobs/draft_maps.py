"""Draft vocabulary maps from files: safetensors, ``.npy``, a pair of them, a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdtool.core.errors import InputError
from opdtool.core.words import plural

if TYPE_CHECKING:
    from torch import Tensor

    from opdtool.io.checkpoints import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMap:
    """A map, and what the files around it say of sizes.

    ``implied`` says that there is no d2t because the draft has the target's whole vocabulary.
    """

    d2t: Tensor
    t2d: Tensor | None
    head: tuple[str, tuple[int, ...]] | None
    vocab_size: int | None
    draft_vocab_size: int | None
    end_ids: tuple[int, ...]
    config_path: Path | None
    implied: bool = False


def read_draft_map(
    paths: Sequence[Path], *, config: Path | None = None, rename: Mapping[str, str] | None = None
) -> DraftMap:
    """The map in one file or checkpoint, or d2t and t2d from two files in either order.

    Raises:
        InputError: more than two paths, no d2t, or two of one kind.
    """
    if len(paths) > 2:
        raise InputError(
            f"{plural(len(paths), 'file')} given; a map is one file, or d2t and t2d in two"
        )
    implied = None
    parts: list[Draft] = []
    for path in paths:
        implied = implied or _implied(path, config, rename)
        if implied is None:
            parts.append(_read(path, config, rename))
    if implied is not None:
        return implied
    d2t = _only("d2t", [(part.path, part.d2t) for part in parts], paths)
    if d2t is None:
        raise InputError(f"{paths[0]}: it has a t2d and no d2t; give the file with d2t as well")
    first = parts[0]
    config_path = next((part.config_path for part in parts if part.config_path), None)
    return DraftMap(
        d2t=d2t,
        t2d=_only("t2d", [(part.path, part.t2d) for part in parts], paths),
        head=next((part.head for part in parts if part.head), None),
        vocab_size=first.vocab_size or parts[-1].vocab_size,
        draft_vocab_size=first.draft_vocab_size or parts[-1].draft_vocab_size,
        end_ids=_end_ids(config_path),
        config_path=config_path,
    )


def _read(path: Path, config: Path | None, rename: Mapping[str, str] | None) -> Draft:
    from opdtool.io.checkpoints import open_draft
    from opdtool.io.npy import is_npy

    if not is_npy(path):
        return open_draft(path, config=config, rename=rename)
    beside = path.parent / "config.json"
    draft = open_draft(path, config=config or (beside if beside.is_file() else None))
    from dataclasses import replace

    import torch

    if draft.d2t is not None and (draft.d2t.dtype == torch.bool or "t2d" in path.stem.lower()):
        return replace(draft, d2t=None, t2d=draft.d2t)
    return draft


def _only(
    name: str, found: Sequence[tuple[Path, Tensor | None]], paths: Sequence[Path]
) -> Tensor | None:
    """The one tensor of this name."""
    there = [(path, tensor) for path, tensor in found if tensor is not None]
    if len(there) > 1:
        raise InputError(
            f"{' and '.join(map(str, paths))}: both have a {name}; give one map, and the other "
            "with --against"
        )
    return there[0][1] if there else None


def _implied(path: Path, config: Path | None, rename: Mapping[str, str] | None) -> DraftMap | None:
    """The identity, for a checkpoint without a map whose draft has all target ids."""
    import torch

    from opdtool.io.checkpoints import open_checkpoint

    if not path.is_dir():
        return None
    with open_checkpoint(path, config=config, rename=rename) as checkpoint:
        names = checkpoint.source.names()
        if any(name.rpartition(".")[2] in ("d2t", "t2d") for name in names):
            return None
        V, D = checkpoint.size("vocab_size"), checkpoint.size("draft_vocab_size")
        if V is None or D != V:
            return None
        heads = [name for name in names if name.endswith("lm_head.weight")]
        return DraftMap(
            d2t=torch.zeros(V, dtype=torch.int64),
            t2d=None,
            head=(heads[0], checkpoint.source.info(heads[0]).shape) if len(heads) == 1 else None,
            vocab_size=V,
            draft_vocab_size=D,
            end_ids=(),
            config_path=checkpoint.config_path,
            implied=True,
        )


def _end_ids(config_path: Path | None) -> tuple[int, ...]:
    """``eos_token_id`` of a configuration: one id, several, or none."""
    from opdtool.io.checkpoints import config_value, read_config

    if config_path is None:
        return ()
    value: Any = config_value(read_config(config_path), "eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if type(one) is int and one >= 0)
