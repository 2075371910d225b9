"""``opdtool reconstruct --student``: what each position counts, and masks that cannot be meant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cli.conftest import Cli
from tests.cli.test_reconstruct import report_of, save

STARTS, LENGTHS = (0, 8, 16, 19), (5, 7, 3)
"""Three segments, and a tail of one slot that holds none."""
T = 20


class Packed:
    """A pack of three rows and a tail, its masks, and the divergence that they weigh."""

    def __init__(self, where: Path) -> None:
        made = torch.Generator().manual_seed(9)
        hidden = torch.randn(1, T, 16, generator=made)
        head = torch.randn(50, 16, generator=made)
        logits = hidden @ head.t()
        student = logits + torch.randn(logits.shape, generator=made)
        p, q = logits.double().log_softmax(-1), student.double().log_softmax(-1)
        self.kl = (p.exp() * (p - q)).sum(-1)[0]
        self.where = where
        self.tensors = {
            "teacher_full_hidden_states": hidden,
            "cu_seqlens": torch.tensor([0, 5, 12, 15, 15]),
            "cu_seqlens_padded": torch.tensor([*STARTS, T]),
        }
        self.mask = torch.zeros(1, T)
        for start, length in zip(STARTS, LENGTHS, strict=False):
            self.mask[0, start + 1 : start + length] = 1
        save(where / "head.safetensors", **{"lm_head.weight": head})
        save(where / "student.safetensors", student_logits=student)
        self.argv: list[object] = [
            where / "payload.safetensors", "--head", where / "head.safetensors", "--packed",
            "--student", where / "student.safetensors",
        ]  # fmt: skip

    def write(self, **masks: Tensor) -> None:
        save(self.where / "payload.safetensors", **self.tensors, **masks)

    def student(self, cli: Cli) -> dict[str, Any]:
        found: dict[str, Any] = report_of(cli, *self.argv)["stats"]["student"]
        return found

    def refused(self, cli: Cli) -> str:
        done = cli("reconstruct", *self.argv)
        assert (done.status, done.out) == (2, "")
        assert len(done.err.splitlines()) <= 2
        return str(done.err)


@pytest.mark.parametrize("tail", [(), (1.0,)])
def test_a_sample_mask_weighs_the_segments_of_a_pack(
    cli: Cli, tmp_path: Path, tail: tuple[float, ...]
) -> None:
    pack = Packed(tmp_path)
    pack.write(token_mask=pack.mask, sample_mask=torch.tensor([1.0, 0.0, 0.5, *tail]))
    # Slot t speaks of token t + 1: the first four of five, none of seven, two of three at half.
    wanted = float((pack.kl[0:4].sum() + 0.5 * pack.kl[16:18].sum()) / 5)
    found = pack.student(cli)
    assert (found["weight"], found["positions"]) == (5.0, 6)
    assert found["forward_kl"]["mean"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_sample_mask_of_another_batch_is_refused(cli: Cli, tmp_path: Path, count: int) -> None:
    pack = Packed(tmp_path)
    pack.write(token_mask=pack.mask, sample_mask=torch.ones(count))
    assert "expected one for each of 4 segments" in pack.refused(cli)


def test_one_rank_s_mask_is_not_the_pack_s(cli: Cli, tmp_path: Path) -> None:
    pack = Packed(tmp_path)
    pack.write(draft_token_mask=torch.ones(1, T // 2))
    assert "give the mask of the whole pack, not of one rank" in pack.refused(cli)


@pytest.mark.parametrize("name", ["token_mask", "draft_token_mask", "sample_mask"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_mask_that_is_not_finite_is_refused(
    cli: Cli, tmp_path: Path, name: str, odd: float
) -> None:
    pack = Packed(tmp_path)
    masks = {"token_mask": pack.mask.clone(), "sample_mask": torch.ones(3)}
    if name == "draft_token_mask":
        masks[name] = pack.mask.clone()
    masks[name].view(-1)[2] = odd
    pack.write(**masks)
    assert f"{name}[" in pack.refused(cli)
    assert "a mask holds finite weights" in pack.refused(cli)


def test_a_mask_of_nothing_is_nothing_checked(cli: Cli, tmp_path: Path) -> None:
    pack = Packed(tmp_path)
    pack.write(draft_token_mask=torch.zeros(1, T))
    assert "nothing would be checked" in pack.refused(cli)


def test_the_sample_mask_of_the_batch_has_its_rows(cli: Cli, tmp_path: Path) -> None:
    pack = Packed(tmp_path)
    pack.write()
    rows = torch.zeros(3, 8)
    for b, length in enumerate(LENGTHS):
        rows[b, 1:length] = 1
    batch = tmp_path / "batch.safetensors"
    pack.argv += ["--batch", batch]
    save(batch, token_mask=rows, sample_mask=torch.tensor([1.0, 0.0, 0.5]))
    assert pack.student(cli)["weight"] == 5.0
    for count in (2, 5):
        save(batch, token_mask=rows, sample_mask=torch.ones(count))
        assert f"sample_mask has {count} entries, but token_mask 3 rows" in pack.refused(cli)


def test_a_sample_mask_alone_weighs_the_real_positions(cli: Cli, tmp_path: Path) -> None:
    pack = Packed(tmp_path)
    pack.write(sample_mask=torch.tensor([1.0, 0.0, 0.5]))
    found = pack.student(cli)
    assert (found["weight"], found["positions"]) == (5 + 0.5 * 3, 8)
    assert found["weighted_by"] == "draft token mask"


def test_masks_of_rows_that_are_too_narrow_or_too_few_are_refused(cli: Cli, tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(2, 6, 16, generator=made), torch.randn(30, 16, generator=made)
    save(tmp_path / "head.safetensors", **{"lm_head.weight": head})
    save(tmp_path / "student.safetensors", student_logits=hidden @ head.t())
    argv = [
        tmp_path / "payload.safetensors", "--head", tmp_path / "head.safetensors",
        "--student", tmp_path / "student.safetensors",
    ]  # fmt: skip
    lengths = torch.tensor([6, 0])
    for masks, said in (
        ({"token_mask": torch.ones(2, 4)}, "token_mask has 4 columns, but row 0 has 6 tokens"),
        ({"sample_mask": torch.ones(1)}, "sample_mask has 1 entry; expected one for each of 2"),
    ):
        save(
            tmp_path / "payload.safetensors",
            teacher_full_hidden_states=hidden,
            input_lengths=lengths,
            **masks,
        )
        done = cli("reconstruct", *argv)
        assert (done.status, done.out) == (2, "")
        assert said in done.err
