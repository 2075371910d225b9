"""Checkpoints: where the output layer and the norm are, shards, indices, draft maps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from opdtool.core.errors import InputError
from opdtool.io.checkpoints import (
    find_head,
    find_norm,
    norm_eps,
    open_checkpoint,
    open_draft,
    parse_head_spec,
    parse_head_specs,
    require_norm,
)
from opdtool.io.tensors import open_tensors


def model(folder: Path, names: Mapping[str, int], config: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint of one file; each tensor is [rows, 2] full of its row count."""
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.full((rows, 2), float(rows)) for name, rows in names.items()}
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def sharded(folder: Path, weight_map: Mapping[str, str]) -> Path:
    """A checkpoint whose every tensor is [1] and holds its place in the map."""
    folder.mkdir(exist_ok=True)
    for shard in sorted({shard for shard in weight_map.values() if "/" not in shard}):
        own = {
            name: torch.tensor([float(place)])
            for place, (name, file) in enumerate(weight_map.items())
            if file == shard
        }
        save_file(own, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("names", "config", "expected"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], None, "lm_head.weight"),
        (["language_model.lm_head.weight"], None, "language_model.lm_head.weight"),
        (["model.lm_head.weight", "draft.lm_head.weight"], None, "model.lm_head.weight"),
        (["model.embed_tokens.weight"], {"tie_word_embeddings": True}, "model.embed_tokens.weight"),
        (
            ["model.language_model.embed_tokens.weight"],
            {"text_config": {"tie_word_embeddings": True}},
            "model.language_model.embed_tokens.weight",
        ),
        (
            ["lm_head.weight", "model.embed_tokens.weight"],
            {"tie_word_embeddings": True},
            "lm_head.weight",
        ),
    ],
)
def test_the_output_layer_is_found(
    names: list[str], config: dict[str, Any] | None, expected: str, tmp_path: Path
) -> None:
    path = model(tmp_path / "m", {name: 3 + place for place, name in enumerate(names)}, config)
    with open_checkpoint(path) as checkpoint:
        assert find_head(checkpoint) == expected


@pytest.mark.parametrize("config", [None, {}, {"tie_word_embeddings": False}, {"a": 1}])
def test_untied_embeddings_are_no_output_layer(
    config: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = model(tmp_path / "m", {"model.embed_tokens.weight": 4, "x": 1}, config)
    with open_checkpoint(path) as checkpoint, pytest.raises(InputError) as refusal:
        find_head(checkpoint)
    assert "candidates: model.embed_tokens.weight" in str(refusal.value)
    assert f"{path}:KEY" in str(refusal.value)


def test_two_output_layers_are_refused_and_a_key_chooses(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"a.lm_head.weight": 4, "b.lm_head.weight": 5})
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(InputError, match="2 output layers"):
            find_head(checkpoint)
        assert find_head(checkpoint, "b.lm_head.weight") == "b.lm_head.weight"
        with pytest.raises(InputError, match=r"no tensor c; candidates: a\.lm_head\.weight"):
            find_head(checkpoint, "c")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.norm.weight", "model.layers.0.norm.weight"], "model.norm.weight"),
        (["norm.weight"], "norm.weight"),
        (["language_model.model.norm.weight"], "language_model.model.norm.weight"),
        (["model.layers.0.norm.weight", "visual.norm.weight"], None),
        (["decoder.final_layernorm.weight"], "decoder.final_layernorm.weight"),
        (["a.norm.weight", "b.norm.weight"], None),
    ],
)
def test_the_final_norm_is_found_or_said_to_be_unknown(
    names: list[str], expected: str | None, tmp_path: Path
) -> None:
    path = model(tmp_path / "m", dict.fromkeys(names, 2))
    with open_checkpoint(path) as checkpoint:
        assert find_norm(checkpoint) == expected
        if expected is None:
            with pytest.raises(InputError, match=r"no model\.norm\.weight"):
                require_norm(checkpoint)


def test_the_epsilon_comes_from_the_configuration(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({"rms_norm_eps": 1e-6}, 1e-6),
        ({"text_config": {"rms_norm_eps": 1e-5}}, 1e-5),
        ({}, None),
    ]
    for number, (config, expected) in enumerate(cases):
        with open_checkpoint(model(tmp_path / str(number), {"x": 1}, config)) as checkpoint:
            assert norm_eps(checkpoint) == expected
    for number, bad in enumerate(["small", True, -1, 0, [1e-6]]):
        path = model(tmp_path / f"bad{number}", {"x": 1}, {"rms_norm_eps": bad})
        with open_checkpoint(path) as checkpoint, pytest.raises(InputError, match="rms_norm_eps"):
            norm_eps(checkpoint)


def test_shards_are_read_through_the_index_and_only_when_needed(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {"a": "1.safetensors", "b": "2.safetensors"})
    (path / "1.safetensors").unlink()  # not downloaded
    with open_tensors(path) as source:
        assert source.names() == ["a", "b"]
        assert source.read("b").tolist() == [1.0]
        with pytest.raises(InputError, match=r"1\.safetensors: no such file"):
            source.read("a")


def test_a_whole_file_goes_before_an_index_and_before_other_files(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {"a": "1.safetensors"})
    save_file({"b": torch.ones(1)}, path / "model.safetensors")
    with open_tensors(path) as source:
        assert source.names() == ["b"]
    (path / "model.safetensors.index.json").unlink()
    with open_tensors(path) as source:
        assert source.names() == ["a", "b"]  # no checkpoint: a directory of files
    (path / "config.json").write_text("{}")
    with open_tensors(path) as source:
        assert source.names() == ["b"]


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {"a": "1.safetensors"})
    index = {"weight_map": {"a": "1.safetensors", "c": "1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_tensors(path) as source, pytest.raises(InputError, match="no tensor c, though"):
        source.read("c")


@pytest.mark.parametrize("shard", ["../secret.safetensors", "a/../../s", "", ".."])
def test_an_index_does_not_lead_out_of_its_directory(shard: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    for name in (shard, str(tmp_path / "secret.safetensors")):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": name}})
        )
        with pytest.raises(InputError, match="is not a file of its directory"):
            open_tensors(folder)


def test_a_link_out_of_the_directory_is_refused_but_a_model_cache_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    os.symlink(tmp_path / "secret.safetensors", folder / "1.safetensors")
    index = json.dumps({"weight_map": {"a": "1.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match="a link out of its directory"):
        open_tensors(folder)

    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "rev").mkdir(parents=True)
    save_file({"a": torch.full((1,), 5.0)}, cache / "blobs" / "123")
    (cache / "blobs" / "456").write_text(index)
    os.symlink("../../blobs/123", cache / "snapshots" / "rev" / "1.safetensors")
    os.symlink("../../blobs/456", cache / "snapshots" / "rev" / "model.safetensors.index.json")
    with open_tensors(cache / "snapshots" / "rev") as source:
        assert source.read("a").item() == 5.0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index\.json"):
        open_tensors(tmp_path)


def test_a_head_is_written_as_index_path_and_key(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    (tmp_path / "c").mkdir()
    here = str(tmp_path)
    cases = {
        f"{here}/c": (0, f"{here}/c", None),
        f"3={here}/c": (3, f"{here}/c", None),
        f"-1={here}/c:x.y": (-1, f"{here}/c", "x.y"),
        f"{here}/a:b": (0, f"{here}/a:b", None),
        f"2={here}/a:b:key": (2, f"{here}/a:b", "key"),
        f"{here}/none:key": (0, f"{here}/none", "key"),
        "x=y": (0, "x=y", None),
    }
    for text, expected in cases.items():
        spec = parse_head_spec(text)
        assert (spec.index, str(spec.path), spec.key) == expected
    for text in ("", "1=", f"{here}/c:", ":key", "9" * 30 + "=x"):
        with pytest.raises(InputError, match="--head"):
            parse_head_spec(text)


def test_the_same_teacher_twice_is_refused() -> None:
    assert [spec.index for spec in parse_head_specs(["0=a", "1=b"])] == [0, 1]
    with pytest.raises(InputError, match="teacher 0 twice"):
        parse_head_specs(["a", "b"])


def test_a_draft_checkpoint_tells_its_map_its_head_and_its_sizes(tmp_path: Path) -> None:
    save_file(
        {
            "d2t": torch.tensor([0, 1]),
            "t2d": torch.tensor([True, False, True]),
            "lm_head.weight": torch.zeros(2, 4),
        },
        tmp_path / "model.safetensors",
    )
    config = {"draft_vocab_size": 2, "transformer_layer_config": {"vocab_size": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = open_draft(tmp_path)
    assert draft.d2t is not None
    assert draft.d2t.tolist() == [0, 1]
    assert draft.t2d is not None
    assert draft.t2d.tolist() == [True, False, True]
    assert draft.head == ("lm_head.weight", (2, 4))
    assert (draft.vocab_size, draft.draft_vocab_size) == (3, 2)
    assert draft.paths == (tmp_path / "model.safetensors",)


def test_a_draft_map_may_be_an_npy_file(tmp_path: Path) -> None:
    np.save(tmp_path / "d2t.npy", np.array([0, 2, 2]))
    draft = open_draft(tmp_path / "d2t.npy")
    assert draft.d2t is not None
    assert draft.d2t.tolist() == [0, 2, 2]
    assert (draft.t2d, draft.vocab_size) == (None, None)


def test_a_draft_without_a_map_or_with_odd_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tensor d2t"):
        open_draft(model(tmp_path / "m", {"x": 1}))
    for number, size in enumerate([0, -3, 1.5, True, "32000"]):
        folder = model(tmp_path / str(number), {"d2t": 1}, {"draft_vocab_size": size})
        with pytest.raises(InputError, match="draft_vocab_size is"):
            open_draft(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_configuration_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"x": 1})
    (path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("0007=p", 7),
        ("-0=p", 0),
        ("-12=p", -12),
        ("0" * 5000 + "3=p", 3),
        ("9" * 18 + "=p", 10**18 - 1),
    ],
)
def test_an_index_may_have_zeros_in_front(text: str, index: int) -> None:
    assert parse_head_spec(text).index == index


@pytest.mark.parametrize("digits", ["1" * 19, "-" + "1" * 19, "9" * 5000, "0" + "9" * 5000])
def test_an_index_past_int64_is_refused_however_many_digits_it_has(digits: str) -> None:
    with pytest.raises(InputError, match="the index is past int64"):
        parse_head_spec(f"{digits}=p")
