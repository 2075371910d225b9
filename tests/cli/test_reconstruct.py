"""``opdtool reconstruct`` as users type it, on the fixtures and on small made-up data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Cli
from tests.reference.teacher import logits_of, shard_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
HIDDEN = FIXTURES / "teacher_hidden.safetensors"
PRENORM = FIXTURES / "teacher_hidden_prenorm.safetensors"
LOGITS = FIXTURES / "teacher_logits.safetensors"
HEADS = ("--head", f"0={FIXTURES / 'teacher-a'}", "--head", f"1={FIXTURES / 'teacher-b'}")


def report_of(cli: Cli, *argv: object, status: int = 0) -> dict[str, Any]:
    done = cli("reconstruct", *argv, "--device", "cpu", "--format", "json")
    assert done.status == status, done.err + done.out
    found: dict[str, Any] = json.loads(done.out)
    return found


def check(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [c for c in report["checks"] if c["name"] == name]
    return dict(found)


def shards(folder: Path, tp: int, cp: int) -> dict[tuple[int, int], Tensor]:
    found = {}
    for t in range(tp):
        for c in range(cp):
            parts = (f".tp{t}of{tp}" if tp > 1 else "") + (f".cp{c}of{cp}" if cp > 1 else "")
            file = folder / f"teacher_logits{parts}.safetensors"
            found[t, c] = load_file(file)["teacher_logits"]
    assert len(list(folder.glob("*.safetensors"))) == tp * cp
    return found


# ---------------------------------------------------------------- the fixtures


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_both_teachers_recorded_logits_are_rebuilt_from_their_checkpoints(
    cli: Cli, tmp_path: Path, tp: int, cp: int
) -> None:
    out = tmp_path / "out"
    report = report_of(
        cli, HIDDEN, *HEADS, "--reference", LOGITS, "--tp", tp, "--cp", cp, "-o", out
    )
    assert check(report, "logits-match")["mismatches"] == 0
    assert check(report, "logits-match")["total"] == 955 * 320  # the real tokens
    index = load_file(HIDDEN)["opd_full_teacher_index"].tolist()
    assert set(index) == {0, 1}
    recorded = load_file(LOGITS)["teacher_full_logits"].float().numpy()
    gathered = shards(out, tp, cp)
    for (t, c), shard in gathered.items():
        want = shard_of(
            recorded.astype(np.float64), tp_rank=t, tp_size=tp, cp_rank=c, cp_size=cp, padded=96
        )
        assert shard.shape == want.shape
        assert np.allclose(shard.float().numpy(), want, rtol=2.0**-7, atol=1e-4)
    whole = tmp_path / "whole"
    report_of(cli, HIDDEN, *HEADS, "-o", whole)
    one = shards(whole, 1, 1)[0, 0].float().numpy().astype(np.float64)
    for (t, c), shard in gathered.items():
        want = shard_of(one, tp_rank=t, tp_size=tp, cp_rank=c, cp_size=cp, padded=96)
        assert np.allclose(shard.float().numpy(), want, rtol=2.0**-7, atol=1e-4)


def test_the_pre_norm_dump_gives_the_same_logits_through_the_final_norm(cli: Cli) -> None:
    norms = [word.replace("--head", "--norm") for word in HEADS]
    report = report_of(cli, PRENORM, *HEADS, *norms, "--reference", LOGITS)
    assert check(report, "logits-match")["mismatches"] == 0
    assert "|x|_4" in report["stats"]["reference"]["tolerance"]
    bare = report_of(cli, PRENORM, *HEADS, "--reference", LOGITS, status=1)
    assert [d["fault"] for d in bare["diagnosis"]] == ["norm-missing"]
    twice = report_of(cli, HIDDEN, *HEADS, *norms, "--reference", LOGITS, status=1)
    assert [d["fault"] for d in twice["diagnosis"]] == ["norm-applied-twice"]


def test_swapped_heads_are_misrouted_teachers(cli: Cli) -> None:
    swapped = ("--head", f"1={FIXTURES / 'teacher-a'}", "--head", f"0={FIXTURES / 'teacher-b'}")
    report = report_of(cli, HIDDEN, *swapped, "--reference", LOGITS, status=1)
    assert [d["fault"] for d in report["diagnosis"]] == ["teachers-misrouted"]
    assert "0 -> 1, 1 -> 0" in report["diagnosis"][0]["message"]
    assert report["diagnosis"][0]["match"] == "exact"


def test_recorded_log_probabilities_of_the_fixtures_agree(cli: Cli, tmp_path: Path) -> None:
    scores = FIXTURES / "logprobs.safetensors"
    report = report_of(cli, HIDDEN, *HEADS, "--logprobs", scores)
    total = check(report, "logprobs-match")["total"]
    lengths = load_file(HIDDEN)["input_lengths"]
    assert total == int((lengths - 1).sum()) > 900
    left_out = report["stats"]["logprobs"]["left_out"]
    assert left_out == {
        "first_tokens": 16,
        "padding": 16 * 96 - int(lengths.sum()),
        "not_recorded": 0,
    }
    values = load_file(scores)["logprobs"]
    save_file({"logprobs": values[:, 1:].contiguous()}, tmp_path / "short.safetensors")
    short = report_of(cli, HIDDEN, *HEADS, "--logprobs", tmp_path / "short.safetensors")
    assert check(short, "logprobs-match")["total"] == total
    save_file({"logprobs": values.roll(1, 1)}, tmp_path / "late.safetensors")
    late = report_of(cli, HIDDEN, *HEADS, "--logprobs", tmp_path / "late.safetensors", status=1)
    found = check(late, "logprobs-match")
    assert found["mismatches"] > total // 2
    place = found["first"][0]
    assert place["actual"] == pytest.approx(
        float(values.roll(1, 1)[place["sequence"], place["position"]])
    )
    assert place["expected"] == pytest.approx(
        float(values[place["sequence"], place["position"]]), abs=0.05
    )


def test_divergences_are_weighed_by_the_rolled_mask(cli: Cli) -> None:
    report = report_of(cli, HIDDEN, *HEADS, "--student", FIXTURES / "student_logits.safetensors")
    stats = report["stats"]["student"]
    given = load_file(HIDDEN)
    teacher = load_file(LOGITS)["teacher_full_logits"].double().log_softmax(-1)
    student = load_file(FIXTURES / "student_logits.safetensors")["student_logits"].double()
    student = student.log_softmax(-1)
    weights = torch.zeros(16, 96, dtype=torch.float64)
    for b, length in enumerate(given["input_lengths"].tolist()):
        for t in range(length - 1):
            weights[b, t] = given["token_mask"][b, t + 1] * given["sample_mask"][b]
    assert 0 < weights.sum() < weights.numel()
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    entropy = -(teacher.exp() * teacher).sum(-1)
    for name, values in (
        ("forward_kl", forward),
        ("reverse_kl", reverse),
        ("teacher_entropy", entropy),
        ("student_entropy", -(student.exp() * student).sum(-1)),
    ):
        want = float((values * weights).sum() / weights.sum())
        assert stats[name]["mean"] == pytest.approx(want, rel=2e-3), name
    assert stats["weight"] == float(weights.sum())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_teacher_that_is_its_own_student_diverges_by_nothing(
    cli: Cli, tmp_path: Path, tp: int
) -> None:
    out = tmp_path / "own"
    report_of(cli, HIDDEN, *HEADS, "-o", out, "--tp", tp, "--cp", 2)
    report = report_of(
        cli, HIDDEN, *HEADS, "--tp", tp, "--cp", 2, "--student", out,
        "--rename", "student_logits=teacher_logits",
    )  # fmt: skip
    assert report["stats"]["student"]["forward_kl"]["max"] < 1e-6
    assert report["stats"]["student"]["reverse_kl"]["max"] < 1e-6
    assert report["stats"]["student"]["teacher_entropy"]["mean"] > 0.1


def test_the_manifest_binds_heads_to_their_index(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report_of(cli, HIDDEN, *HEADS, "-o", out)
    manifest = json.loads((out / "manifest.json").read_text())
    heads = {i["index"]: i for i in manifest["inputs"] if i["role"] == "head"}
    assert heads[0]["tensor"] == "lm_head.weight"
    assert heads[1]["tensor"] == "model.embed_tokens.weight"
    assert heads[0]["sha256"] != heads[1]["sha256"]
    again = report_of(cli, HIDDEN, *HEADS, "--reference", out)
    assert check(again, "head-identity")["status"] == "pass"
    swapped = ("--head", f"1={FIXTURES / 'teacher-a'}", "--head", f"0={FIXTURES / 'teacher-b'}")
    renamed = report_of(cli, HIDDEN, *swapped, "--reference", out, status=1)
    found = check(renamed, "head-identity")
    assert found["status"] == "fail"
    assert "it is the one of teacher 1 there" in found["message"]


def test_the_same_command_gives_the_same_bytes_and_keeps_what_is_there(
    cli: Cli, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        report_of(cli, HIDDEN, *HEADS, "--tp", 2, "--cp", 2, "-o", tmp_path / name)
    first = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert len(first) == 5
    assert first == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    refused = cli("reconstruct", HIDDEN, *HEADS, "-o", tmp_path / "a")
    assert refused.status == 2
    assert "--force" in refused.err
    assert cli("reconstruct", HIDDEN, *HEADS, "-o", tmp_path / "a", "--force").status == 0


# ---------------------------------------------------------------- made-up data


def small(seed: int, *shape: int) -> Tensor:
    """Whole numbers, so that products are exact in every dtype and order."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=made).float()


def save(path: Path, **tensors: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    return path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A payload [3, 6, 4], two heads [8, 4], an index, and nothing else."""
    hidden = small(1, 3, 6, 4)
    save(
        tmp_path / "payload.safetensors",
        teacher_full_hidden_states=hidden,
        opd_full_teacher_index=torch.tensor([5, 2, 5]),
    )
    save(tmp_path / "two.safetensors", **{"lm_head.weight": small(2, 8, 4)})
    save(tmp_path / "five.safetensors", **{"lm_head.weight": small(5, 8, 4)})
    return tmp_path


def two_heads(where: Path) -> list[str]:
    return ["--head", f"2={where}/two.safetensors", "--head", f"5={where}/five.safetensors"]


def right(where: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    heads = {
        index: load_file(where / f"{name}.safetensors")["lm_head.weight"].double().numpy()
        for index, name in ((2, "two"), (5, "five"))
    }
    payload = load_file(where / "payload.safetensors")
    return logits_of(
        payload["teacher_full_hidden_states"].double().numpy(),
        heads,
        payload["opd_full_teacher_index"].tolist(),
    )


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_every_shard_is_what_a_slow_reference_computes(
    cli: Cli, made: Path, tp: int, cp: int
) -> None:
    out = made / "out"
    report_of(
        cli, made / "payload.safetensors", *two_heads(made), "--tp", tp, "--cp", cp, "-o", out
    )
    padded = {1: 6, 2: 8, 4: 8}[cp]
    for (t, c), shard in shards(out, tp, cp).items():
        want = shard_of(right(made), tp_rank=t, tp_size=tp, cp_rank=c, cp_size=cp, padded=padded)
        assert np.array_equal(shard.double().numpy(), want)


def test_tiny_memory_gives_the_same_numbers(
    cli: Cli, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opdtool.jobs.reconstruct import engine
    from opdtool.jobs.reconstruct import sizes as reconstruct_sizes

    monkeypatch.setattr(reconstruct_sizes, "LEAST_COLUMNS", 2)
    monkeypatch.setattr(reconstruct_sizes, "LEAST_POSITIONS", 2)
    seen: set[reconstruct_sizes.Sizes] = set()
    plain = reconstruct_sizes.sizes_for

    def noted(plan: Any) -> reconstruct_sizes.Sizes:
        seen.add(plain(plan))
        return plain(plan)

    monkeypatch.setattr(engine, "sizes_for", noted)
    out = made / "out"
    save(made / "ref.safetensors", teacher_full_logits=torch.from_numpy(right(made)).float())
    report = report_of(
        cli, made / "payload.safetensors", *two_heads(made), "--cp", 2, "-o", out,
        "--reference", made / "ref.safetensors", "--max-memory", "300",
    )  # fmt: skip
    assert max((s.tile, s.columns) for s in seen) <= (2, 2)
    assert check(report, "logits-match")["total"] == 3 * 6 * 8
    for (t, c), shard in shards(out, 1, 2).items():
        want = shard_of(right(made), tp_rank=t, tp_size=1, cp_rank=c, cp_size=2, padded=8)
        assert np.array_equal(shard.double().numpy(), want)


def test_the_student_may_be_longer_than_the_payload(cli: Cli, made: Path) -> None:
    out = made / "out"
    argv = [made / "payload.safetensors", *two_heads(made), "--cp", 2]
    report_of(cli, *argv, "--student-seq-len", 12, "-o", out)
    for (t, c), shard in shards(out, 1, 2).items():
        want = shard_of(right(made), tp_rank=t, tp_size=1, cp_rank=c, cp_size=2, padded=12)
        assert np.array_equal(shard.double().numpy(), want)
    assert float(np.abs(shards(out, 1, 2)[0, 0][:, 3:].numpy()).max()) == 0.0


def test_a_pack_is_cut_and_routed_segment_by_segment(cli: Cli, made: Path) -> None:
    hidden = small(7, 1, 16, 4)
    save(
        made / "pack.safetensors",
        teacher_full_hidden_states=hidden,
        cu_seqlens_padded=torch.tensor([0, 4, 12, 16], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 3, 10, 13], dtype=torch.int32),
        opd_full_teacher_index=torch.tensor([5, 2, 5]),
    )
    out = made / "out"
    report_of(cli, made / "pack.safetensors", *two_heads(made), "--packed", "--cp", 2, "-o", out)
    heads = {
        i: load_file(made / f"{name}.safetensors")["lm_head.weight"]
        for i, name in ((2, "two"), (5, "five"))
    }
    route = [5] * 4 + [2] * 8 + [5] * 4
    full = torch.stack([heads[route[t]] @ hidden[0, t] for t in range(16)])
    windows = {0: [0, 3, 4, 5, 10, 11, 12, 15], 1: [1, 2, 6, 7, 8, 9, 13, 14]}
    for rank, slots in windows.items():
        assert torch.equal(shards(out, 1, 2)[0, rank][0], full[slots])


def test_draft_columns_are_cut_from_the_head(cli: Cli, made: Path) -> None:
    ids = torch.tensor([6, 1, 3, 0])  # in no order, as some tools write them
    save(made / "map.safetensors", d2t=ids - torch.arange(4))
    save(made / "whole.safetensors", teacher_full_logits=torch.from_numpy(right(made)).float())
    cut = torch.from_numpy(right(made)[..., ids.numpy()]).float()
    save(made / "cut.safetensors", teacher_full_logits=cut)
    for reference in ("whole", "cut"):
        out = made / reference
        report = report_of(
            cli, made / "payload.safetensors", *two_heads(made), "--tp", 2, "-o", out,
            "--d2t", made / "map.safetensors", "--reference", made / f"{reference}.safetensors",
        )  # fmt: skip
        assert check(report, "logits-match")["total"] == 3 * 6 * 4
        for (t, _), shard in shards(out, 2, 1).items():
            assert torch.equal(shard, cut[..., 2 * t : 2 * t + 2])


def test_a_mismatch_in_a_draft_column_is_placed_in_both_vocabularies(cli: Cli, made: Path) -> None:
    ids = torch.tensor([1, 3, 4, 6])
    save(made / "map.safetensors", d2t=ids - torch.arange(4))
    whole = torch.from_numpy(right(made)).float()
    whole[1, 4, 3] += 5
    save(made / "whole.safetensors", teacher_full_logits=whole)
    report = report_of(
        cli, made / "payload.safetensors", *two_heads(made), "--tp", 2, "--cp", 2,
        "--d2t", made / "map.safetensors", "--reference", made / "whole.safetensors", status=1,
    )  # fmt: skip
    (place,) = check(report, "logits-match")["first"]
    assert place == {
        "sequence": 1, "position": 4, "draft_column": 1, "column": 3, "tp_rank": 0, "cp_rank": 1,
        "expected": float(whole[1, 4, 3]) - 5, "actual": float(whole[1, 4, 3]),
    }  # fmt: skip
    assert report["stats"]["reference"]["max_abs_error"]["value"] == 5.0
    assert report["stats"]["reference"]["least_tolerance"]["atol"] == 5.0
    assert report["diagnosis"] == []


def test_a_payload_of_logits_is_cut_and_padded(cli: Cli, made: Path) -> None:
    full = torch.from_numpy(right(made)).float()
    save(made / "logits.safetensors", teacher_full_logits=full)
    out = made / "out"
    report_of(cli, made / "logits.safetensors", "--tp", 2, "--cp", 2, "-o", out)
    for (t, c), shard in shards(out, 2, 2).items():
        want = shard_of(right(made), tp_rank=t, tp_size=2, cp_rank=c, cp_size=2, padded=8)
        assert np.array_equal(shard.double().numpy(), want)


def test_padding_rows_are_told_from_real_ones(cli: Cli, made: Path) -> None:
    full = torch.from_numpy(right(made)).float()
    padded = torch.cat([full, torch.zeros(3, 6, 4)], -1)
    save(made / "ref.safetensors", teacher_full_logits=padded)
    save(made / "student.safetensors", student_logits=torch.cat([full, full[..., :4]], -1))
    out = made / "out"
    report = report_of(
        cli, made / "payload.safetensors", *two_heads(made), "--pad-vocab-to-multiple-of", 6,
        "--tp", 3, "-o", out, "--reference", made / "ref.safetensors",
        "--student", made / "student.safetensors",
    )  # fmt: skip
    assert report["geometry"]["padding_columns"] == 4
    assert check(report, "logits-match")["total"] == 3 * 6 * 12
    # The student's own padding columns are outside its softmax: it is its own teacher.
    assert report["stats"]["student"]["forward_kl"]["max"] < 1e-6
    parts = [shards(out, 3, 1)[t, 0] for t in range(3)]
    assert torch.equal(torch.cat(parts, -1), padded)


def test_scale_and_softcap_come_after_the_head(cli: Cli, made: Path) -> None:
    raw = torch.from_numpy(right(made)).float()
    full = 7.0 * (raw * 0.5 / 7.0).tanh()
    save(made / "ref.safetensors", teacher_full_logits=full)
    report = report_of(
        cli, made / "payload.safetensors", *two_heads(made), "--logit-scale", 0.5,
        "--logit-softcap", 7, "--reference", made / "ref.safetensors",
    )  # fmt: skip
    assert check(report, "logits-match")["mismatches"] == 0
    report_of(
        cli, made / "payload.safetensors", *two_heads(made), "--logit-softcap", 7,
        "--reference", made / "ref.safetensors", status=1,
    )  # fmt: skip


@pytest.mark.parametrize("offset", [0, 1])
def test_a_norm_with_and_without_an_offset(cli: Cli, made: Path, offset: int) -> None:
    weight = torch.tensor([0.5, 1.0, 1.5, 2.0])
    hidden = load_file(made / "payload.safetensors")["teacher_full_hidden_states"]
    hidden[0, 0] = 0.0
    save(made / "one.safetensors", teacher_full_hidden_states=hidden)
    save(made / "norm.safetensors", gain=weight)
    scale = (hidden.square().mean(-1, keepdim=True) + 0.25).rsqrt()
    head = load_file(made / "two.safetensors")["lm_head.weight"]
    full = (hidden * scale * (weight + offset)) @ head.t()
    save(made / "ref.safetensors", teacher_full_logits=full)
    report = report_of(
        cli, made / "one.safetensors", "--head", made / "two.safetensors",
        "--norm", f"{made / 'norm.safetensors'}:gain", "--norm-eps", 0.25,
        "--norm-offset", offset, "--reference", made / "ref.safetensors",
    )  # fmt: skip
    assert check(report, "logits-match")["mismatches"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_compute_dtype_is_the_outputs(cli: Cli, made: Path, dtype: str) -> None:
    out = made / "out"
    report_of(
        cli, made / "payload.safetensors", *two_heads(made), "--compute-dtype", dtype, "-o", out
    )
    shard = shards(out, 1, 1)[0, 0]
    assert shard.dtype == getattr(torch, dtype)
    assert np.array_equal(shard.double().numpy(), right(made))


def test_float64_is_computed_and_written_in_float64(cli: Cli, made: Path) -> None:
    payload = load_file(made / "payload.safetensors")
    hidden = payload["teacher_full_hidden_states"].double() + 2.0**-40
    save(made / "payload.safetensors", **(payload | {"teacher_full_hidden_states": hidden}))
    for name in ("two", "five"):
        head = load_file(made / f"{name}.safetensors")["lm_head.weight"]
        save(made / f"{name}.safetensors", **{"lm_head.weight": head.double()})
    want = right(made)
    assert not np.array_equal(want, want.astype(np.float32))
    save(made / "ref.safetensors", teacher_full_logits=torch.from_numpy(want))
    out = made / "out"
    report_of(
        cli, made / "payload.safetensors", *two_heads(made), "-o", out,
        "--reference", made / "ref.safetensors",
    )  # fmt: skip
    assert np.array_equal(shards(out, 1, 1)[0, 0].numpy(), want)


def test_given_tolerances_replace_the_derived_one(cli: Cli, made: Path) -> None:
    full = torch.from_numpy(right(made)).float() + 0.25
    save(made / "ref.safetensors", teacher_full_logits=full)
    argv = [
        made / "payload.safetensors", *two_heads(made), "--reference", made / "ref.safetensors"
    ]  # fmt: skip
    assert report_of(cli, *argv, "--atol", 0.26)["passed"]
    tight = report_of(cli, *argv, "--atol", 0.24, status=1)
    assert check(tight, "logits-match")["mismatches"] == full.numel()
    assert tight["stats"]["reference"]["least_tolerance"]["atol"] == pytest.approx(0.25)
    assert tight["stats"]["reference"]["tolerance"] == "|a-ref| <= 0.24"
    assert report_of(cli, *argv, status=1)["stats"]["reference"]["tolerance"] != ""


def test_a_logit_that_is_not_finite_is_found_and_placed(cli: Cli, made: Path) -> None:
    payload = load_file(made / "payload.safetensors")
    payload["teacher_full_hidden_states"][1, 3, 0] = torch.nan
    save(made / "nan.safetensors", **payload)
    report = report_of(cli, made / "nan.safetensors", *two_heads(made), "--cp", 2, status=1)
    found = check(report, "logits-finite")
    assert found["mismatches"] == 8
    assert {(p["sequence"], p["position"]) for p in found["first"]} == {(1, 3)}


def test_float32_logits_that_were_bfloat16_pass_and_it_is_said(cli: Cli, made: Path) -> None:
    payload = load_file(made / "payload.safetensors")
    payload["teacher_full_hidden_states"] += 0.01 * small(9, 3, 6, 4)
    save(made / "payload.safetensors", **payload)
    full = torch.from_numpy(right(made)).float()
    assert not torch.equal(full.bfloat16().float(), full)
    for reference in (full.bfloat16(), full.bfloat16().float()):
        save(made / "ref.safetensors", teacher_full_logits=reference)
        report = report_of(
            cli, made / "payload.safetensors", *two_heads(made),
            "--reference", made / "ref.safetensors",
        )  # fmt: skip
        assert [d["fault"] for d in report["diagnosis"]] == ["rounding-only"]
        assert report["stats"]["reference"]["precision"] == "bfloat16"


# ---------------------------------------------------------------- refusals


def refused(cli: Cli, *argv: object) -> str:
    done = cli("reconstruct", *argv)
    assert done.status == 2, done.out
    assert done.out == ""
    assert len(done.err.strip().splitlines()) <= 2
    return done.err


def test_heads_that_cannot_be_right_are_refused(cli: Cli, made: Path) -> None:
    payload = made / "payload.safetensors"
    save(made / "wide.safetensors", **{"lm_head.weight": small(1, 8, 5)})
    save(made / "turned.safetensors", **{"lm_head.weight": small(1, 4, 8)})
    save(made / "more.safetensors", **{"lm_head.weight": small(1, 9, 4)})
    save(made / "half.safetensors", **{"lm_head.weight": small(1, 8, 4).half()})
    save(made / "fp8.safetensors", **{"lm_head.weight": small(1, 8, 4).to(torch.float8_e4m3fn)})
    save(made / "odd.safetensors", weight=small(1, 8, 4))
    two = f"2={made}/two.safetensors"
    for more, message in (
        ([], "pass the teacher's output layer as --head"),
        (["--head", two], "row 0 names teacher 5, whose head is not loaded (loaded: 2)"),
        (["--head", two, "--head", f"5={made}/wide.safetensors"], "teacher 5 has shape [8, 5]"),
        (["--head", two, "--head", f"5={made}/turned.safetensors"], "it looks transposed"),
        (["--head", two, "--head", f"5={made}/more.safetensors"], "shards of 8 and 9 rows"),
        (["--head", two, "--head", f"5={made}/half.safetensors"], "float32 and torch.float16"),
        (["--head", f"5={made}/fp8.safetensors"], "float8_e4m3fn, which cannot be multiplied"),
        (["--head", two, "--head", two], "gives teacher 2 twice"),
        (["--head", f"2={made}/odd.safetensors"], "weight"),
        (["--head", f"2={made}/absent.safetensors"], "absent.safetensors"),
        ([*two_heads(made), "--tp", 3], "8 columns is not divisible by TP 3 (remainder 2)"),
        ([*two_heads(made), "--norm", f"7={made}/two.safetensors"], "which has no --head"),
        ([*two_heads(made), "--student-seq-len", 5], "--student-seq-len is 5"),
        ([*two_heads(made), "--student-seq-len", 10, "--cp", 2], "no multiple of 4"),
        ([*two_heads(made), "--packed"], "leave it out"),
        ([*two_heads(made), "--payload", "logits"], "holds no teacher_full_logits"),
        ([*two_heads(made), "--logit-softcap", 0], "--logit-softcap is 0"),
        ([*two_heads(made), "--rtol", 0.1], "add --reference"),
        ([*two_heads(made), "--rename", "teacher_full_logits=nothing"], "nothing"),
    ):
        assert message in refused(cli, payload, *more), more


def test_an_index_that_cannot_be_right_is_refused(cli: Cli, made: Path) -> None:
    hidden = load_file(made / "payload.safetensors")["teacher_full_hidden_states"]
    for tags, message in (
        (torch.tensor([2, 5]), "has 2 entries for 3 rows"),
        (torch.tensor([2.0, 5.0, 2.0]), "expected integers"),
        (None, "holds no opd_full_teacher_index"),
    ):
        extra = {} if tags is None else {"opd_full_teacher_index": tags}
        save(made / "odd.safetensors", teacher_full_hidden_states=hidden, **extra)
        assert message in refused(cli, made / "odd.safetensors", *two_heads(made))


def test_one_head_without_an_index_serves_all_rows(cli: Cli, made: Path) -> None:
    hidden = load_file(made / "payload.safetensors")["teacher_full_hidden_states"]
    save(made / "one.safetensors", teacher_full_hidden_states=hidden)
    report_of(cli, made / "one.safetensors", "--head", f"3={made}/two.safetensors")
    # Given an index, it is obeyed: INDEX is 0 when it is left out.
    assert "names teacher 5" in refused(
        cli, made / "payload.safetensors", "--head", f"{made}/two.safetensors"
    )


def test_references_that_cannot_be_compared_are_refused(cli: Cli, made: Path) -> None:
    payload = [made / "payload.safetensors", *two_heads(made)]
    full = torch.from_numpy(right(made)).float()
    for name, tensors, message in (
        ("rows", {"teacher_full_logits": full[:2]}, "has shape [2, 6, 8], but [3, 6, ...]"),
        ("short", {"teacher_full_logits": full[:, :5]}, "has shape [3, 5, 8]"),
        ("ints", {"teacher_full_logits": full.int()}, "expected float logits"),
        ("other", {"logits": full}, "neither teacher_full_logits and teacher_logits"),
        ("x.tp0of2", {"teacher_logits": full[..., :4]}, "lacks 1 of 2 shards"),
    ):
        path = save(made / f"{name}.safetensors", **tensors)
        assert message in refused(cli, *payload, "--reference", path), name
    save(made / "s" / "x.cp0of2.safetensors", teacher_logits=full[:, :4])
    save(made / "s" / "x.cp1of2.safetensors", teacher_logits=full[:, :4])
    message = refused(cli, *payload, "--reference", made / "s", "--cp", 4)
    assert "is cut for CP 2, which contradicts CP 4; pass --cp 2" in message


def test_both_payloads_in_one_file_need_a_choice(cli: Cli, made: Path) -> None:
    tensors = load_file(made / "payload.safetensors")
    tensors["teacher_full_logits"] = torch.from_numpy(right(made)).float()
    path = save(made / "both.safetensors", **tensors)
    assert "choose with --payload" in refused(cli, path, *two_heads(made))
    report_of(cli, path, *two_heads(made), "--payload", "hidden_states")
    report_of(cli, path, "--payload", "logits")
