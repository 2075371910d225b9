"""What ``opdtool reconstruct`` refuses, and faults that it names at their edges."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.conftest import Cli
from tests.cli.test_reconstruct import check, report_of, save


def model(where: Path, B: int = 2, S: int = 4, H: int = 8, V: int = 48) -> tuple[Tensor, list[str]]:
    """Logits in float32, and the arguments for their payload and head."""
    made = torch.Generator().manual_seed(11)
    hidden, head = torch.randn(B, S, H, generator=made), torch.randn(V, H, generator=made)
    save(where / "payload.safetensors", teacher_full_hidden_states=hidden)
    save(where / "head.safetensors", **{"lm_head.weight": head})
    argv = [str(where / "payload.safetensors"), "--head", str(where / "head.safetensors")]
    return hidden @ head.t(), argv


def refused(cli: Cli, *argv: object) -> str:
    done = cli("reconstruct", *argv)
    assert done.status == 2, done.err + done.out
    assert done.out == ""
    return str(done.err)


@pytest.mark.parametrize("off", [-1e4, torch.finfo(torch.float32).min, 60.0])
@pytest.mark.parametrize("shift", [3, -5, 12])
def test_a_shifted_vocabulary_is_named_whatever_fell_off_its_edge(
    cli: Cli, tmp_path: Path, shift: int, off: float
) -> None:
    logits, argv = model(tmp_path)
    moved = logits.roll(-shift, -1)
    edge = slice(-shift, None) if shift > 0 else slice(0, -shift)
    moved[..., edge] = off * torch.rand(moved[..., edge].shape)
    save(tmp_path / "ref.safetensors", teacher_full_logits=moved)
    report = report_of(cli, *argv, "--reference", tmp_path / "ref.safetensors", status=1)
    (found,) = report["diagnosis"]
    assert (found["fault"], found["match"]) == ("vocab-window-shifted", "exact")
    assert f"column j{shift:+d}" in found["message"]


def test_no_order_of_four_positions_but_a_rotation_is_a_shift(cli: Cli, tmp_path: Path) -> None:
    logits, argv = model(tmp_path, B=1)
    named = {}
    for order in itertools.permutations(range(4)):
        if order[:2] != (2, 3) and order[-1] != 0 and order != (1, 2, 3, 0):
            continue
        save(tmp_path / "ref.safetensors", teacher_full_logits=logits[:, list(order)])
        argv_ = [*argv, "--reference", tmp_path / "ref.safetensors"]
        report = report_of(cli, *argv_, status=1)
        named[order] = [found["fault"] for found in report["diagnosis"]]
    assert len(named) == 7
    for rotation in ((1, 2, 3, 0), (2, 3, 0, 1)):
        assert named.pop(rotation) == ["sequence-shifted"]
    assert set(map(tuple, named.values())) == {()}


def test_a_head_by_another_name_may_be_renamed(cli: Cli, tmp_path: Path) -> None:
    logits, argv = model(tmp_path)
    head = load_file(tmp_path / "head.safetensors")["lm_head.weight"]
    save(tmp_path / "head.safetensors", theirs=head, other=head + 1)
    save(tmp_path / "ref.safetensors", teacher_full_logits=logits)
    argv += ["--reference", str(tmp_path / "ref.safetensors")]
    assert "lm_head.weight" in refused(cli, *argv)
    report = report_of(cli, *argv, "--rename", "lm_head.weight=theirs")
    assert check(report, "logits-match")["mismatches"] == 0
    assert "lm_head" in refused(cli, *argv, "--rename", "lm_head.weight=nothing")


def test_nothing_to_rebuild_is_refused(cli: Cli, tmp_path: Path) -> None:
    _, argv = model(tmp_path)
    save(tmp_path / "map.safetensors", d2t=torch.zeros(0, dtype=torch.int64))
    assert "map.safetensors" in refused(cli, *argv, "--d2t", tmp_path / "map.safetensors")
    save(tmp_path / "head.safetensors", **{"lm_head.weight": torch.zeros(0, 8)})
    assert "head.safetensors" in refused(cli, *argv)


@pytest.mark.parametrize("device", ["tpu", "mps", "cpu:0", "cuda:x"])
def test_a_device_that_is_none_is_refused(cli: Cli, tmp_path: Path, device: str) -> None:
    _, argv = model(tmp_path)
    message = refused(cli, *argv, "--device", device)
    assert f"--device '{device}' is none" in message
    assert "cuda:N" in message


@pytest.mark.parametrize("end", [6, 12])
def test_offsets_of_another_pack_are_refused(cli: Cli, tmp_path: Path, end: int) -> None:
    _, argv = model(tmp_path, B=1, S=8)
    hidden = load_file(tmp_path / "payload.safetensors")["teacher_full_hidden_states"]
    for last, status in ((8, 0), (end, 2)):
        offsets = torch.tensor([0, 4, last])
        save(
            tmp_path / "payload.safetensors",
            teacher_full_hidden_states=hidden,
            cu_seqlens_padded=offsets,
        )
        done = cli("reconstruct", *argv, "--packed")
        assert done.status == status
    assert f"cu_seqlens_padded ends at {end}" in done.err
    assert "payload.safetensors" in done.err


def test_refusals_name_the_file_and_the_tensor(cli: Cli, tmp_path: Path) -> None:
    _, argv = model(tmp_path, B=1, S=8)
    hidden = load_file(tmp_path / "payload.safetensors")["teacher_full_hidden_states"]
    payload = tmp_path / "payload.safetensors"
    head = load_file(tmp_path / "head.safetensors")["lm_head.weight"]
    for wrong in (head[:, :7], head.int(), head[0]):
        save(tmp_path / "head.safetensors", **{"lm_head.weight": wrong})
        assert "head.safetensors" in refused(cli, *argv)
    save(tmp_path / "head.safetensors", **{"lm_head.weight": head})
    save(payload, teacher_full_hidden_states=hidden, opd_full_teacher_index=torch.tensor([3]))
    message = refused(cli, *argv)
    assert "payload.safetensors" in message
    assert "teacher 3" in message
    save(payload, teacher_full_hidden_states=hidden, cu_seqlens_padded=torch.tensor([0, 6, 4, 8]))
    message = refused(cli, *argv, "--packed")
    assert "payload.safetensors, cu_seqlens_padded" in message
    two = torch.cat([hidden, hidden])
    save(payload, teacher_full_hidden_states=two, opd_full_teacher_index=torch.tensor([[0, 0]]))
    assert "[1, 2]" in refused(cli, *argv)
    for ids in ([0, 50], [0, 1, 2]):
        d2t = torch.tensor(ids) - torch.arange(len(ids))
        save(tmp_path / "map.safetensors", d2t=d2t)
        message = refused(cli, *argv[1:], payload, "--d2t", tmp_path / "map.safetensors", "--tp", 2)
    save(payload, teacher_full_hidden_states=hidden)
    message = refused(cli, *argv, "--d2t", tmp_path / "map.safetensors", "--tp", 2)
    assert "map.safetensors" in message
    assert "--pad-vocab" not in message


def test_an_output_never_replaces_what_is_read(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    logits, argv = model(folder)
    save(tmp_path / "ref" / "ref.safetensors", teacher_full_logits=logits)
    for kept in (folder, tmp_path / "ref"):
        before = sorted(path.name for path in kept.iterdir())
        refused(cli, *argv, "--reference", tmp_path / "ref", "-o", kept, "--force")
        assert sorted(path.name for path in kept.iterdir()) == before


def test_every_file_of_a_payload_directory_is_bound(cli: Cli, tmp_path: Path) -> None:
    _, argv = model(tmp_path / "data")
    folder = tmp_path / "dump"
    folder.mkdir()
    (tmp_path / "data" / "payload.safetensors").rename(folder / "payload.safetensors")
    save(folder / "more.safetensors", opd_full_teacher_index=torch.tensor([0, 0]))
    report_of(cli, folder, *argv[1:], "-o", tmp_path / "out")
    inputs = json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"]
    bound = [one for one in inputs if one["role"] == "payload"]
    assert sorted(one["name"] for one in bound) == ["more.safetensors", "payload.safetensors"]
    assert len({one["sha256"] for one in bound}) == 2


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_of_the_whole_vocabulary_are_cut_to_the_draft_columns(
    cli: Cli, tmp_path: Path, tp: int
) -> None:
    logits, argv = model(tmp_path)
    ids = torch.tensor([1, 2, 13, 20, 25, 31, 40, 47])
    save(tmp_path / "map.safetensors", d2t=ids - torch.arange(8))
    argv += ["--d2t", str(tmp_path / "map.safetensors"), "--reference", str(tmp_path / "ref")]
    for wrong, status in ((0.0, 0), (1.0, 1)):
        logits[1, 2, 31] += wrong
        for rank, shard in enumerate(logits.chunk(tp, -1)):
            name = f"teacher_logits.tp{rank}of{tp}.safetensors"
            save(tmp_path / "ref" / name, teacher_logits=shard)
        report = report_of(cli, *argv, status=status)
        found = check(report, "logits-match")
        assert found["total"] == 2 * 4 * 8
        assert [place["column"] for place in found["first"]] == [31] * status


def test_a_pack_takes_the_masks_of_its_batch(cli: Cli, tmp_path: Path) -> None:
    logits, argv = model(tmp_path, B=1, S=12)
    hidden = load_file(tmp_path / "payload.safetensors")["teacher_full_hidden_states"]
    offsets, padded = torch.tensor([0, 3, 10]), torch.tensor([0, 4, 12])
    save(
        tmp_path / "payload.safetensors",
        teacher_full_hidden_states=hidden,
        cu_seqlens=offsets,
        cu_seqlens_padded=padded,
    )
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1]])
    sample = torch.tensor([0.5, 2.0])
    save(tmp_path / "batch.safetensors", token_mask=mask, sample_mask=sample)
    save(tmp_path / "student.safetensors", student_logits=logits + torch.randn(logits.shape))
    report = report_of(
        cli, *argv, "--packed", "--student", tmp_path / "student.safetensors",
        "--batch", tmp_path / "batch.safetensors",
    )  # fmt: skip
    # Tokens 1, 2 of the first row; 2, 3, 5, 6 of the second, whose eighth is not real.
    assert report["stats"]["student"]["weight"] == 2 * 0.5 + 4 * 2.0
    assert report["stats"]["student"]["positions"] == 6
