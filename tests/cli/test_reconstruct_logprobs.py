"""``opdtool reconstruct --logprobs``: which tokens are scored, how, and what is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.conftest import Cli
from tests.cli.test_reconstruct import check, report_of, save

B, S, H, V = 3, 8, 64, 96
LENGTHS = (8, 5, 3)


class World:
    """A payload, its head and tokens, and the log-probabilities that a slow way gives them."""

    def __init__(self, where: Path, dtype: torch.dtype = torch.float32) -> None:
        made = torch.Generator().manual_seed(7)
        self.where = where
        self.hidden = torch.randn(B, S, H, generator=made).to(dtype)
        self.head = (torch.randn(V, H, generator=made) * 3 / H**0.5).to(dtype)
        self.ids = torch.randint(0, V, (B, S), generator=made)
        self.lengths = torch.tensor(LENGTHS)
        self.exact = self.hidden.double() @ self.head.double().t()
        save(where / "head.safetensors", **{"lm_head.weight": self.head})
        self.batch = {"input_ids": self.ids, "input_lengths": self.lengths}
        save(where / "payload.safetensors", teacher_full_hidden_states=self.hidden, **self.batch)
        self.argv: list[object] = [
            where / "payload.safetensors", "--head", where / "head.safetensors",
            "--logprobs", where / "scores.safetensors",
        ]  # fmt: skip

    def scores(self, logits: Tensor | None = None) -> Tensor:
        """[B, S] float32: entry t scores token t, entry 0 is junk; padding is junk."""
        logits = self.exact if logits is None else logits
        scores = torch.full((B, S), 77.0)
        for b, length in enumerate(LENGTHS):
            for t in range(1, length):
                row = logits[b, t - 1].double()
                own = row[self.ids[b, t]] - torch.logsumexp(row, -1)
                scores[b, t] = float(own)
        return scores

    def run(self, cli: Cli, scores: Tensor, *argv: object, status: int = 0) -> dict[str, Any]:
        save(self.where / "scores.safetensors", logprobs=scores)
        return report_of(cli, *self.argv, *argv, status=status)


def refused(cli: Cli, *argv: object) -> str:
    done = cli("reconstruct", *argv)
    assert done.status == 2, done.err + done.out
    assert done.out == ""
    assert len(done.err.strip().splitlines()) <= 2
    return str(done.err)


TOKENS = sum(length - 1 for length in LENGTHS)


@pytest.mark.parametrize("cut", [(), ("--cp", 2), ("--tp", 2), ("--tp", 4, "--cp", 2)])
def test_every_real_token_but_the_first_is_scored(
    cli: Cli, tmp_path: Path, cut: tuple[object, ...]
) -> None:
    world = World(tmp_path)
    scores = world.scores()
    for given in (scores, scores[:, 1:].contiguous()):
        stats = world.run(cli, given, *cut)["stats"]["logprobs"]
        assert stats["tokens"] == TOKENS == 13
        assert stats["left_out"] == {"first_tokens": 3, "padding": 8, "not_recorded": 0}
    for b, t in ((0, 1), (0, 7), (1, 4), (2, 2)):
        wrong = scores.clone()
        wrong[b, t] += 1e-3
        report = world.run(cli, wrong, *cut, status=1)
        found = check(report, "logprobs-match")
        assert found["mismatches"] == 1
        (place,) = found["first"]
        assert (place["sequence"], place["position"]) == (b, t)
        assert place["actual"] == pytest.approx(float(wrong[b, t]))
        stats = report["stats"]["logprobs"]
        assert stats["worst"]["place"] == place
        assert stats["max_abs_error"]["value"] == pytest.approx(1e-3, rel=0.02)


def test_the_least_tolerance_is_the_one_that_passes(cli: Cli, tmp_path: Path) -> None:
    world = World(tmp_path)
    scores = world.scores()
    scores[1, 2] -= 0.01
    report = world.run(cli, scores, status=1)
    stats = report["stats"]["logprobs"]
    assert stats["worst"]["multiple"] == stats["least_tolerance"]["multiple"] > 10
    assert stats["tolerance"] in check(report, "logprobs-match")["message"]
    assert 0 < stats["allowed"]["median"] <= stats["allowed"]["max"] < 1e-3
    for name in ("atol", "rtol"):
        least = stats["least_tolerance"][name]
        assert world.run(cli, scores, f"--{name}", least * 1.001)["passed"]
        report = world.run(cli, scores, f"--{name}", least * 0.999, status=1)
        assert check(report, "logprobs-match")["mismatches"] == 1
        assert report["stats"]["logprobs"]["tolerance"].startswith("|a-ref| <= ")


def test_what_is_said_of_log_probabilities(cli: Cli, tmp_path: Path) -> None:
    world = World(tmp_path)
    save(tmp_path / "scores.safetensors", logprobs=world.scores())
    said = cli("reconstruct", *world.argv).out
    assert "13 log-probabilities are compared; left out: 3 first tokens" in said
    assert "8 padding" in said
    assert "worst error / its tolerance" in said


@pytest.mark.parametrize("filler", [0.0, 1.0, float("nan"), float("-inf"), -1.0])
def test_prompts_that_were_not_scored_are_left_out_and_counted(
    cli: Cli, tmp_path: Path, filler: float
) -> None:
    world = World(tmp_path)
    mask = torch.ones(B, S)
    mask[0, :4] = mask[1, :3] = 0
    sample = torch.tensor([1.0, 1.0, 0.0])
    save(tmp_path / "masks.safetensors", token_mask=mask, sample_mask=sample)
    scores = world.scores()
    argv = ("--batch", tmp_path / "masks.safetensors")
    # Prompts that were scored are compared, and so is a row that is dropped.
    assert world.run(cli, scores, *argv)["stats"]["logprobs"]["tokens"] == 13
    wrong = scores.clone()
    wrong[0, 2] += 0.01
    assert check(world.run(cli, wrong, *argv, status=1), "logprobs-match")["mismatches"] == 1
    scores[mask == 0] = filler
    scores[2] = filler
    stats = world.run(cli, scores, *argv)["stats"]["logprobs"]
    assert stats["tokens"] == 4 + 2
    assert stats["left_out"]["not_recorded"] == 3 + 2 + 2
    # Where there are no masks nothing says that these are none.
    report = world.run(cli, scores, status=1)
    assert check(report, "logprobs-match")["mismatches"] == 7


def packed(world: World, order: tuple[int, ...] = (2, 0, 1)) -> tuple[list[object], Tensor]:
    """The same rows in a pack with a tail; its arguments, and its scores in its own slots."""
    padded = [4, 8, 8]
    offsets = [0, *torch.tensor(padded).cumsum(0).tolist(), 24]
    hidden = torch.full((1, 24, H), 5.0).to(world.hidden.dtype)
    ids, scores = torch.full((1, 24), V + 9), torch.full((1, 24), 55.0)
    for segment, b in enumerate(order):
        at = slice(offsets[segment], offsets[segment] + LENGTHS[b])
        hidden[0, at] = world.hidden[b, : LENGTHS[b]]
        ids[0, at] = world.ids[b, : LENGTHS[b]]
        scores[0, at] = world.scores()[b, : LENGTHS[b]]
    lengths = torch.tensor([0, *(LENGTHS[b] for b in order), 0])
    save(
        world.where / "pack.safetensors",
        teacher_full_hidden_states=hidden,
        input_ids=ids,
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
        cu_seqlens_padded=torch.tensor(offsets, dtype=torch.int32),
        sequence_index=torch.tensor(order),
    )
    return [world.where / "pack.safetensors", *world.argv[1:], "--packed"], scores


@pytest.mark.parametrize("cp", [1, 2])
def test_a_pack_is_scored_in_its_own_slots_or_in_the_rows_of_its_batch(
    cli: Cli, tmp_path: Path, cp: int
) -> None:
    world = World(tmp_path)
    world.argv, in_slots = packed(world)
    in_rows = world.scores()
    save(tmp_path / "rows.safetensors", **world.batch)
    batch = ("--batch", tmp_path / "rows.safetensors")
    forms: list[tuple[Tensor, tuple[object, ...], tuple[int, int]]] = [
        (in_slots, (), (0, 4 + 3)),
        (in_slots, batch, (0, 4 + 3)),
        (in_rows, (), (0, 3)),
        (in_rows, batch, (0, 3)),
        (in_rows[:, 1:].contiguous(), batch, (0, 2)),
    ]
    for scores, more, at in forms:
        stats = world.run(cli, scores, *more, "--cp", cp)["stats"]["logprobs"]
        assert stats["tokens"] == 13
        assert stats["left_out"] == {"first_tokens": 3, "padding": 8, "not_recorded": 0}
        wrong = scores.clone()
        wrong[at] -= 0.01
        report = world.run(cli, wrong, *more, "--cp", cp, status=1)
        (place,) = check(report, "logprobs-match")["first"]
        # The first row is the second segment.
        assert (place["sequence"], place["position"]) == (1, 3)


def test_a_pack_without_an_index_holds_the_rows_in_order(cli: Cli, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.argv, _ = packed(world, order=(2, 0, 1))
    tensors = load_file(tmp_path / "pack.safetensors")
    index = tensors.pop("sequence_index")
    save(tmp_path / "pack.safetensors", **tensors)
    scores = world.scores()
    assert world.run(cli, scores[index])["stats"]["logprobs"]["tokens"] == 13
    save(tmp_path / "scores.safetensors", logprobs=scores[:2])
    message = refused(cli, *world.argv)
    assert "2 rows and there is no sequence_index, but the pack has 4 segments" in message
    save(tmp_path / "pack.safetensors", **tensors, sequence_index=torch.tensor([2, 0, 3]))
    save(tmp_path / "scores.safetensors", logprobs=scores)
    assert "sequence_index[2] is 3, but logprobs has 3 rows" in refused(cli, *world.argv)


@pytest.mark.parametrize("name", ["input_lengths", "attention_mask"])
def test_lengths_may_be_the_batchs(cli: Cli, tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=world.hidden)
    mask = (torch.arange(S)[None] < world.lengths[:, None]).long()
    lengths = {"input_lengths": world.lengths, "attention_mask": mask}[name]
    save(tmp_path / "batch.safetensors", input_ids=world.ids, **{name: lengths})
    batch = ("--batch", tmp_path / "batch.safetensors")
    assert world.run(cli, world.scores(), *batch)["stats"]["logprobs"]["tokens"] == 13
    save(tmp_path / "batch.safetensors", input_ids=world.ids)
    report = world.run(cli, world.scores(), *batch, status=1)
    assert check(report, "logprobs-match")["mismatches"] == 8


@pytest.mark.parametrize("name", ["input_lengths", "attention_mask"])
def test_the_rows_of_several_batch_files_count_on(cli: Cli, tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=world.hidden)
    seen = (torch.arange(S)[None] < world.lengths[:, None]).long()
    trained = seen.clone()
    trained[0, 3] = trained[2, 1] = 0
    tensors = {
        "input_ids": world.ids,
        "token_mask": trained,
        "sample_mask": torch.tensor([1.0, 0.5, 2.0]),
        name: {"input_lengths": world.lengths, "attention_mask": seen}[name],
    }
    save(tmp_path / "whole.safetensors", **tensors)
    save(tmp_path / "first.safetensors", **{n: t[:1].contiguous() for n, t in tensors.items()})
    # The second file is as narrow as its longest row.
    save(
        tmp_path / "second.safetensors",
        **{n: (t[1:, :5] if t.ndim == 2 else t[1:]).contiguous() for n, t in tensors.items()},
    )
    save(tmp_path / "student.safetensors", student_logits=world.exact.float() * 0.9)
    scores = world.scores()
    scores[0, 3] = scores[2, 1] = 0.0
    argv = ("--student", tmp_path / "student.safetensors")
    files = [tmp_path / f"{file}.safetensors" for file in ("first", "second")]
    one = world.run(cli, scores, *argv, "--batch", tmp_path / "whole.safetensors")
    two = world.run(cli, scores, *argv, "--batch", files[0], "--batch", files[1])
    assert two["stats"] == one["stats"]
    assert two["stats"]["logprobs"]["left_out"]["not_recorded"] == 2
    # Tokens 1, 2, 4..7 of the first row at 1, 1..4 of the second at 0.5, 2 of the third at 2.
    assert two["stats"]["student"]["weight"] == 6 + 4 * 0.5 + 2.0
    assert "the payload has 3 rows" in refused(
        cli, *world.argv, *argv, "--batch", files[0], "--batch", files[0]
    )


@pytest.mark.parametrize("behind", [(), ("--logit-scale", 0.6), ("--logit-softcap", 8.0)])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_log_probabilities_pass_however_the_logits_were_rounded(
    cli: Cli, tmp_path: Path, dtype: torch.dtype, wide: bool, behind: tuple[object, ...]
) -> None:
    world = World(tmp_path, dtype)
    logits = world.exact if wide else world.exact.to(dtype)
    if "--logit-scale" in behind:
        logits = logits * 0.6
    if "--logit-softcap" in behind:
        logits = 8.0 * torch.tanh(logits / 8.0)
    scores = world.scores(logits)
    for given in (scores, scores.to(dtype)):
        stats = world.run(cli, given, *behind)["stats"]["logprobs"]
        assert stats["tokens"] == 13
        assert 0 <= stats["worst"]["multiple"] < 0.8
    greatest = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}[dtype]
    assert stats["allowed"]["max"] < greatest
    wrong = scores.clone()
    wrong[0, 3] -= 2 * greatest
    world.run(cli, wrong, *behind, status=1)


def test_a_file_of_bfloat16_scores_in_float32_is_held_to_bfloat16(cli: Cli, tmp_path: Path) -> None:
    world = World(tmp_path)
    scores = world.scores()
    assert (scores.bfloat16().float() - scores).abs().max() > 1e-3
    assert world.run(cli, scores.bfloat16().float())["passed"]


def test_log_probabilities_that_cannot_be_placed_are_refused(cli: Cli, tmp_path: Path) -> None:
    world = World(tmp_path)
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=world.hidden)
    scores = save(tmp_path / "scores.safetensors", logprobs=world.scores())
    assert "add --batch" in refused(cli, *world.argv)
    argv = [*world.argv, "--batch", save(tmp_path / "batch.safetensors", input_ids=world.ids)]
    ids = world.ids.clone()
    ids[0, 3] = V
    for wrong, message in ((ids, f"token {V}, outside"), (ids[:2], "input_ids has shape [2, 8]")):
        save(tmp_path / "batch.safetensors", input_ids=wrong)
        assert message in refused(cli, *argv)
    save(tmp_path / "batch.safetensors", input_ids=world.ids)
    for wrong, found in (
        (world.scores()[:, 2:], "F32 [3, 6]"),
        (world.scores()[:2], "F32 [2, 8]"),
        (world.scores().long(), "I64 [3, 8]"),
    ):
        save(scores, logprobs=wrong)
        assert f"logprobs is {found}" in refused(cli, *argv)
    save(scores, logprobs=world.scores())
    save(tmp_path / "map.safetensors", d2t=torch.arange(4))
    message = refused(cli, *argv, "--d2t", tmp_path / "map.safetensors")
    assert "leave out --d2t" in message
    one = torch.ones(B, dtype=torch.int64)
    save(tmp_path / "batch.safetensors", input_ids=world.ids, input_lengths=one)
    assert "no token is scored" in refused(cli, *argv)
    save(tmp_path / "batch.safetensors", input_ids=world.ids, input_lengths=one + S)
    assert "input_lengths" in refused(cli, *argv)


def test_scores_of_a_pack_that_lack_an_entry_are_refused(cli: Cli, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.argv, in_slots = packed(world)
    save(tmp_path / "scores.safetensors", logprobs=in_slots[:, 1:])
    assert "logprobs is F32 [1, 23]; expected floats [1, 24]" in refused(cli, *world.argv)


@pytest.mark.parametrize("token", [-1, -100])
def test_a_negative_id_at_a_real_position_is_refused(cli: Cli, tmp_path: Path, token: int) -> None:
    world = World(tmp_path)
    ids = world.ids.clone()
    ids[0, 3] = token
    batch = {**world.batch, "input_ids": ids}
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=world.hidden, **batch)
    save(tmp_path / "scores.safetensors", logprobs=world.scores())
    assert f"token {token} at a real position" in refused(cli, *world.argv)
    ids = world.ids.clone()
    ids[2, 5] = token  # padding
    batch = {**world.batch, "input_ids": ids}
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=world.hidden, **batch)
    assert world.run(cli, world.scores())["stats"]["logprobs"]["tokens"] == TOKENS


def test_a_recorded_zero_is_covered_by_no_factor(cli: Cli, tmp_path: Path) -> None:
    world = World(tmp_path)
    scores = world.scores()
    scores[0, 3] = 0.0
    stats = world.run(cli, scores, status=1)["stats"]["logprobs"]
    assert stats["least_tolerance"]["rtol"] == "inf"


@pytest.mark.parametrize("widened", ["nothing", "compute", "dump"])
def test_scores_of_a_narrow_engine_pass_however_wide_its_dump_is(
    cli: Cli, tmp_path: Path, widened: str
) -> None:
    world = World(tmp_path, torch.bfloat16)
    scores = world.scores(world.exact.bfloat16())
    options: tuple[object, ...] = ()
    if widened == "compute":
        options = ("--compute-dtype", "float32")
    if widened == "dump":
        hidden = world.hidden.float()
        save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden, **world.batch)
        save(tmp_path / "head.safetensors", **{"lm_head.weight": world.head.float()})
    assert world.run(cli, scores, *options)["passed"]
    scores[0, 3] -= 0.7
    assert not world.run(cli, scores, *options, status=1)["passed"]


def test_scores_of_fewer_tokens_than_a_pack_s_rows_have_are_refused(
    cli: Cli, tmp_path: Path
) -> None:
    world = World(tmp_path)
    offsets = torch.tensor([0, 8, 13, 16])
    real = torch.arange(S) < world.lengths[:, None]
    save(
        tmp_path / "payload.safetensors",
        teacher_full_hidden_states=world.hidden[real][None].contiguous(),
        cu_seqlens=offsets,
        cu_seqlens_padded=offsets.clone(),
        input_ids=world.ids[real][None].contiguous(),
    )
    save(tmp_path / "scores.safetensors", logprobs=world.scores())
    assert report_of(cli, *world.argv, "--packed")["stats"]["logprobs"]["tokens"] == TOKENS
    save(tmp_path / "scores.safetensors", logprobs=world.scores()[:, :4].contiguous())
    assert "no entry for some of the 8 tokens of sequence 0" in refused(
        cli, *world.argv, "--packed"
    )
