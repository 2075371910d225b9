"""Hugging Face checkpoint directories: the output layer, the final norm, the draft map."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.limits import MOST_IDS
from opdtool.core.words import plural
from opdtool.io.closing import Closing
from opdtool.io.npy import is_npy, read_npy
from opdtool.io.places import read_json_file
from opdtool.io.tensors import TensorSource, open_tensors

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
NORMS = ("norm.weight", "final_layernorm.weight", "final_norm.weight")
_NESTED = ("text_config", "transformer_layer_config", "llm_config")
_LIKELY_HEAD = re.compile(r"(head|embed\w*|output(_layer)?|wte)\.weight$")
_INSIDE = re.compile(r"(^|\.)(layers|blocks|h|visual|vision\w*|audio\w*|encoder)\.")


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What ``[INDEX=]PATH[:KEY]`` says: a teacher's index, its checkpoint, a tensor or None."""

    index: int
    path: Path
    key: str | None


def parse_head_spec(text: str, option: str = "--head") -> HeadSpec:
    """``[INDEX=]PATH[:KEY]``; INDEX is 0 when it is left out.

    A path may itself hold colons: the longest beginning that exists is the path.

    Raises:
        InputError: no path, or an empty KEY.
    """
    match = re.match(r"(-?)0*([0-9]+)=", text)
    rest = text[match.end() :] if match else text
    if match and len(match[2]) > 18:
        raise InputError(f"{option} {match[2][:18]}...={rest}: the index is past int64")
    index = int(match[1] + match[2]) if match else 0
    path, key = rest, None
    if ":" in rest and not _exists(rest):
        colons = [at for at, letter in enumerate(rest) if letter == ":"]
        at = next((at for at in reversed(colons) if _exists(rest[:at])), colons[-1])
        path, key = rest[:at], rest[at + 1 :]
    if not path or key == "":
        raise InputError(f"{option} {text}: expected [INDEX=]PATH[:KEY]")
    return HeadSpec(index, Path(path), key)


def parse_head_specs(texts: Sequence[str], option: str = "--head") -> list[HeadSpec]:
    """Every spec; the same index twice is refused."""
    specs = [parse_head_spec(text, option) for text in texts]
    seen: set[int] = set()
    for spec in specs:
        if spec.index in seen:
            raise InputError(
                f"{option} gives teacher {spec.index} twice; write {option} INDEX=PATH for each"
            )
        seen.add(spec.index)
    return specs


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).exists()
    except (OSError, ValueError):
        return False


class Checkpoint(Closing):
    """A checkpoint: its tensors, and its ``config.json`` (empty where there is none)."""

    def __init__(
        self,
        path: Path,
        *,
        config: Path | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.config_path = config or _config_beside(path)
        self.config: Mapping[str, Any] = read_config(self.config_path) if self.config_path else {}
        self.source: TensorSource = open_tensors([path], rename=rename)

    def setting(self, key: str) -> Any:
        """A value of the configuration, from its top or from the text model's part, or None."""
        return config_value(self.config, key)

    def size(self, key: str) -> int | None:
        """A size of the configuration, such as ``vocab_size``, or None.

        Raises:
            InputError: it is there and no positive integer.
        """
        return config_size(self.config, self.config_path, key)

    def close(self) -> None:
        """Close its files."""
        self.source.close()


def open_checkpoint(
    path: Path | str, *, config: Path | None = None, rename: Mapping[str, str] | None = None
) -> Checkpoint:
    """A checkpoint directory, or one safetensors file with the ``config.json`` beside it.

    Raises:
        InputError: it cannot be read.
    """
    return Checkpoint(Path(path), config=config, rename=rename)


def _config_beside(path: Path) -> Path | None:
    directory = path if path.is_dir() else path.parent
    found = directory / "config.json"
    return found if found.is_file() else None


def read_config(path: Path) -> Mapping[str, Any]:
    """A ``config.json``.

    Raises:
        InputError: it cannot be read, or is no JSON object.
    """
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object; a model's configuration is expected")
    return value


def config_value(config: Mapping[str, Any], key: str) -> Any:
    """A value from the top of a configuration, or from its text model's part, or None."""
    for part in (config, *(config.get(name) for name in _NESTED)):
        if isinstance(part, Mapping) and part.get(key) is not None:
            return part[key]
    return None


def config_size(config: Mapping[str, Any], path: Path | None, key: str) -> int | None:
    """A size from a configuration, or None.

    Raises:
        InputError: it is there and no positive integer.
    """
    value = config_value(config, key)
    if value is None:
        return None
    if type(value) is not int or not 0 < value <= MOST_IDS:
        raise InputError(f"{path}: {key} is {ascii(value)[:60]}; a size is expected")
    return value


def find_head(checkpoint: Checkpoint, key: str | None = None) -> str:
    """The name of the output layer's weight [V, H].

    ``key`` where it is given; else ``lm_head.weight`` with any prefix; else, only where the
    configuration says ``tie_word_embeddings: true``, ``embed_tokens.weight`` with any prefix.

    Raises:
        InputError: there is none, or more than one; it lists the candidates.
    """
    source = checkpoint.source
    if key is not None:
        return _named(checkpoint, key, lambda name: bool(_LIKELY_HEAD.search(name)))
    found = _ending(source, HEAD)
    tied = checkpoint.setting("tie_word_embeddings") is True
    if not found and tied:
        found = _ending(source, EMBEDDING)
    if len(found) == 1:
        return found[0]
    path = checkpoint.path
    if found:
        raise InputError(
            f"{path}: {len(found)} output layers: {', '.join(found[:8])}; name one: "
            f"{path}:{found[0]}"
        )
    names = [name for name in source.names() if _LIKELY_HEAD.search(name)][:8]
    reason = "" if tied else " and config.json does not say tie_word_embeddings: true"
    listed = (
        f"candidates: {', '.join(names)}" if names else f"none of {len(source)} names is like it"
    )
    raise InputError(f"{path}: no {HEAD}{reason}; name the tensor as {path}:KEY ({listed})")


def find_norm(checkpoint: Checkpoint, key: str | None = None) -> str | None:
    """The name of the final norm's weight [H], or None when it cannot be told.

    Raises:
        InputError: ``key`` is given and there is no such tensor.
    """
    if key is not None:
        return _named(checkpoint, key, lambda name: "norm" in name and not _INSIDE.search(name))
    for ending in NORMS:
        found = [name for name in _ending(checkpoint.source, ending) if not _INSIDE.search(name)]
        if len(found) == 1:
            return found[0]
    return None


def require_norm(checkpoint: Checkpoint, key: str | None = None) -> str:
    """:func:`find_norm`, refused when there is none."""
    found = find_norm(checkpoint, key)
    if found is None:
        names = [name for name in checkpoint.source.names() if "norm" in name]
        names = [name for name in names if not _INSIDE.search(name)][:8]
        listed = f" (candidates: {', '.join(names)})" if names else ""
        raise InputError(
            f"{checkpoint.path}: no model.norm.weight; name the tensor as "
            f"{checkpoint.path}:KEY{listed}"
        )
    return found


def norm_eps(checkpoint: Checkpoint) -> float | None:
    """The final norm's epsilon from the configuration, or None.

    Raises:
        InputError: it is there and no positive number.
    """
    for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"):
        value = checkpoint.setting(key)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 < value < 1:
            raise InputError(
                f"{checkpoint.config_path}: {key} is {ascii(value)[:60]}; "
                "a small positive number is expected"
            )
        return float(value)
    return None


def _ending(source: TensorSource, ending: str) -> list[str]:
    """The tensor of that name, or under the usual prefix, or else all under any prefix."""
    for name in (ending, f"model.{ending}"):
        if name in source:
            return [name]
    return [name for name in source.names() if name.endswith(f".{ending}")]


def _named(checkpoint: Checkpoint, key: str, likely: Callable[[str], bool]) -> str:
    if key in checkpoint.source:
        return key
    names = [name for name in checkpoint.source.names() if likely(name)][:8]
    names = names or checkpoint.source.names()[:8]
    raise InputError(f"{checkpoint.path}: no tensor {key}; candidates: {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft vocabulary map, and what the checkpoint around it says.

    Attributes:
        d2t, t2d: the stored tensors, or None each.
        head: the draft head's name and shape, or None.
        vocab_size, draft_vocab_size: from the configuration, or None each.
    """

    path: Path
    paths: tuple[Path, ...]
    d2t: Tensor | None
    t2d: Tensor | None
    head: tuple[str, tuple[int, ...]] | None
    vocab_size: int | None
    draft_vocab_size: int | None
    config_path: Path | None


def open_draft(
    path: Path | str, *, config: Path | None = None, rename: Mapping[str, str] | None = None
) -> Draft:
    """A file with ``d2t`` (or a ``.npy`` that is one), or a draft checkpoint directory.

    ``config`` replaces the ``config.json`` beside it.

    Raises:
        InputError: it cannot be read, or holds neither ``d2t`` nor ``t2d``.
    """
    path = Path(path)
    if is_npy(path):
        d2t = read_npy(path)
        settings = read_config(config) if config else {}
        target, draft = (
            config_size(settings, config, key) for key in ("vocab_size", "draft_vocab_size")
        )
        return Draft(path, (path,), d2t, None, None, target, draft, config)
    with open_checkpoint(path, config=config, rename=rename) as checkpoint:
        source = checkpoint.source
        maps = {name: _map(checkpoint, name) for name in ("d2t", "t2d")}
        if not any(maps.values()):
            source.require("d2t")
        heads = _ending(source, HEAD)
        used = [name for name in (*maps.values(), *heads[:1]) if name is not None]
        return Draft(
            path,
            tuple(dict.fromkeys(source.path_of(name) for name in used)),
            source.read(maps["d2t"]) if maps["d2t"] else None,
            source.read(maps["t2d"]) if maps["t2d"] else None,
            (heads[0], source.info(heads[0]).shape) if len(heads) == 1 else None,
            checkpoint.size("vocab_size"),
            checkpoint.size("draft_vocab_size"),
            checkpoint.config_path,
        )


def _map(checkpoint: Checkpoint, name: str) -> str | None:
    found = _ending(checkpoint.source, name)
    if len(found) > 1:
        raise InputError(
            f"{checkpoint.path}: {plural(len(found), 'tensor')} {name}: {', '.join(found[:8])}; "
            "choose with "
            f"--rename {name}={found[0]}"
        )
    return found[0] if found else None
