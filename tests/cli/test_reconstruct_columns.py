"""``opdtool reconstruct``: numbers that are not finite, padding, and shards of any cut."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.conftest import Cli
from tests.cli.test_reconstruct import check, report_of, save
from tests.cli.test_reconstruct_edges import model


def reference(where: Path, logits: Tensor) -> list[object]:
    return ["--reference", save(where / "ref.safetensors", teacher_full_logits=logits.contiguous())]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["head", "payload"])
def test_one_row_that_is_not_finite_hides_no_other_mismatch(
    cli: Cli, tmp_path: Path, where: str, dtype: torch.dtype, odd: float
) -> None:
    made = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 4, 64, generator=made).to(dtype)
    head = torch.randn(48, 64, generator=made).to(dtype)
    right = (hidden.float() @ head.float().t()).to(dtype)
    if where == "head":
        head[5, 3] = odd
    else:
        hidden[1, 2, 3] = odd
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden)
    save(tmp_path / "head.safetensors", **{"lm_head.weight": head})
    argv = [tmp_path / "payload.safetensors", "--head", tmp_path / "head.safetensors"]
    spoilt = 2 * 4 if where == "head" else 48
    for wrong, mismatches in ((right, spoilt), (right + 3, 2 * 4 * 48)):
        report = report_of(cli, *argv, *reference(tmp_path, wrong), status=1)
        found = check(report, "logits-match")
        assert (found["status"], found["mismatches"]) == ("fail", mismatches)


def test_columns_of_one_side_are_called_padding_where_they_hold_nothing(
    cli: Cli, tmp_path: Path
) -> None:
    logits, argv = model(tmp_path)
    extra = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(1))
    cases: list[tuple[Tensor, list[tuple[str, str]]]] = [
        (torch.cat([logits, torch.zeros(2, 4, 40)], -1), [("vocab-padded", "exact")]),
        (torch.cat([logits, torch.full((2, 4, 3), -1e4)], -1), [("vocab-padded", "exact")]),
        (torch.cat([logits, extra[..., :8]], -1), [("vocab-padded", "likely")]),
        (torch.cat([logits, extra], -1), []),
        (logits[..., :40], [("vocab-padded", "likely")]),
        (logits[..., :24], []),  # one of two shards
    ]
    for recorded, wanted in cases:
        report = report_of(cli, *argv, *reference(tmp_path, recorded), status=1)
        named = [(found["fault"], found["match"]) for found in report["diagnosis"]]
        assert named == wanted, recorded.shape
    hidden = torch.randn(2, 4, 8)
    head = torch.cat([torch.randn(40, 8), torch.zeros(24, 8)])
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden)
    save(tmp_path / "head.safetensors", **{"lm_head.weight": head})
    report = report_of(cli, *argv, *reference(tmp_path, hidden @ head[:40].t()), status=1)
    (found,) = report["diagnosis"]
    assert (found["fault"], found["match"]) == ("vocab-padded", "exact")
    assert "rows 40..63" in found["message"]


def test_a_constant_offset_within_a_given_tolerance_is_not_called_rounding(
    cli: Cli, tmp_path: Path
) -> None:
    logits, argv = model(tmp_path)
    coarse = reference(tmp_path, (logits + 0.05).bfloat16())
    assert report_of(cli, *argv, *coarse, "--atol", 0.2)["diagnosis"] == []
    rounded = reference(tmp_path, logits.bfloat16())
    (found,) = report_of(cli, *argv, *rounded)["diagnosis"]
    assert found["fault"] == "rounding-only"


@pytest.mark.parametrize("tolerance", [(), ("--atol", 1e-3), ("--rtol", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fault_is_named_whatever_the_tolerance(
    cli: Cli, tmp_path: Path, dtype: torch.dtype, tolerance: tuple[object, ...]
) -> None:
    made = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 12, 64, generator=made).to(dtype)
    head = torch.randn(200, 64, generator=made).to(dtype)
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden)
    save(tmp_path / "head.safetensors", **{"lm_head.weight": head})
    argv = [tmp_path / "payload.safetensors", "--head", tmp_path / "head.safetensors"]
    shifted = (hidden @ head.t()).roll(-1, 1)
    given = [*argv, *reference(tmp_path, shifted), *tolerance]
    if tolerance and dtype == torch.float32:
        given[-1] = 1e-3  # products in other orders differ by more than nothing
    report = report_of(cli, *given, status=1)
    assert [found["fault"] for found in report["diagnosis"]] == ["sequence-shifted"]


CUTS = {"even": (0, 24, 48), "uneven": (0, 20, 48), "three": (0, 7, 30, 48)}


@pytest.mark.parametrize(
    ("student", "recorded"),
    [
        (student, recorded)
        for student in CUTS
        for recorded in ("whole", *CUTS, "padded")
        if len(CUTS.get(recorded, CUTS[student])) == len(CUTS[student])  # shards of one TP
    ],
)
def test_a_student_and_a_reference_may_be_cut_each_in_its_own_way(
    cli: Cli, tmp_path: Path, recorded: str, student: str
) -> None:
    logits, argv = model(tmp_path)
    own = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    p, q = logits.double().log_softmax(-1), own.double().log_softmax(-1)
    forward = float((p.exp() * (p - q)).sum(-1).mean())

    def cut(values: Tensor, stem: str, name: str, edges: tuple[int, ...]) -> Path:
        folder = tmp_path / stem
        count = len(edges) - 1
        for t, (low, high) in enumerate(pairwise(edges)):
            piece = values[..., low:high].contiguous()
            save(folder / f"{stem}.tp{t}of{count}.safetensors", **{name: piece})
        return folder

    given: list[object] = ["--student", cut(own, "student", "student_logits", CUTS[student])]
    uneven = recorded in ("uneven", "three", "padded")
    tp = len(CUTS[student]) - 1
    if recorded == "whole":
        given += reference(tmp_path, logits)
    elif recorded == "padded":
        edges = {2: (0, 32, 64), 3: (0, 24, 48, 72)}[tp]
        wide = torch.cat([logits, torch.zeros(2, 4, edges[-1] - 48)], -1)
        given += ["--reference", cut(wide, "ref", "teacher_logits", edges)]
    else:
        given += ["--reference", cut(logits, "ref", "teacher_logits", CUTS[recorded])]
    report = report_of(cli, *argv, "--tp", tp, *given, status=int(uneven))
    assert report["stats"]["student"]["forward_kl"]["mean"] == pytest.approx(forward, rel=1e-4)
    assert check(report, "logits-match")["mismatches"] == 0


def test_a_zero_that_should_be_a_number_is_covered_by_no_factor(cli: Cli, tmp_path: Path) -> None:
    logits, argv = model(tmp_path)
    logits[0, 1, 2] = 0.0
    report = report_of(cli, *argv, *reference(tmp_path, logits), status=1)
    stats = report["stats"]["reference"]
    assert stats["max_rel_error"]["value"] == stats["least_tolerance"]["rtol"] == "inf"
    assert stats["max_rel_error"]["place"]["column"] == 2


@pytest.mark.parametrize("option", ["--atol", "--rtol"])
def test_the_least_tolerance_that_is_shown_is_enough(cli: Cli, tmp_path: Path, option: str) -> None:
    logits, argv = model(tmp_path)
    for seed in range(12):
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
        given = [*argv, *reference(tmp_path, logits + 0.1 * noise)]
        shown = cli("reconstruct", *given).out
        (line,) = [row for row in shown.splitlines() if f"least {option} that would" in row]
        least = line.split()[5]
        assert report_of(cli, *given, option, least)["passed"]
        stored = report_of(cli, *given, status=1)["stats"]["reference"]["least_tolerance"]
        assert report_of(cli, *given, option, stored[option[2:]])["passed"]
        assert 0 <= float(least) / stored[option[2:]] - 1 < 2e-3


def test_each_teacher_s_logits_may_have_been_of_its_own_precision(cli: Cli, tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(4)
    hidden = torch.randn(4, 8, 64, generator=made).bfloat16()
    wide = torch.randn(300, 64, generator=made)
    narrow = torch.randn(300, 64, generator=made).bfloat16()
    index = torch.tensor([0, 1, 0, 0])
    recorded = torch.stack(
        [
            (x @ narrow.t()).float() if teacher else x.float() @ wide.t()
            for x, teacher in zip(hidden, index.tolist(), strict=True)
        ]
    )
    save(
        tmp_path / "payload.safetensors",
        teacher_full_hidden_states=hidden,
        opd_full_teacher_index=index,
    )
    save(tmp_path / "wide.safetensors", **{"lm_head.weight": wide})
    save(tmp_path / "narrow.safetensors", **{"lm_head.weight": narrow})
    argv = [
        tmp_path / "payload.safetensors", "--head", f"0={tmp_path / 'wide.safetensors'}",
        "--head", f"1={tmp_path / 'narrow.safetensors'}", "--compute-dtype", "float32",
    ]  # fmt: skip
    assert report_of(cli, *argv, *reference(tmp_path, recorded))["passed"]
    recorded[1, 3, 7] += 0.5
    report = report_of(cli, *argv, *reference(tmp_path, recorded), status=1)
    assert check(report, "logits-match")["mismatches"] == 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_norm_rounds_as_the_model_did_however_wide_its_dump_is(
    cli: Cli, tmp_path: Path, stored: torch.dtype
) -> None:
    made = torch.Generator().manual_seed(6)
    hidden = (3 * torch.randn(4, 8, 256, generator=made)).bfloat16()
    head = (0.1 * torch.randn(300, 256, generator=made)).bfloat16()
    norm = (1 + 0.2 * torch.randn(256, generator=made)).bfloat16()
    wide = hidden.float()
    normed = norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    recorded = normed @ head.t()
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden.to(stored))
    weights = {"lm_head.weight": head.to(stored), "model.norm.weight": norm.to(stored)}
    path = save(tmp_path / "head.safetensors", **weights)
    argv = [tmp_path / "payload.safetensors", "--head", path, "--norm", path, "--norm-eps", 1e-6]
    for kept in (torch.float32, torch.bfloat16):
        assert report_of(cli, *argv, *reference(tmp_path, recorded.to(kept)))["passed"]
    recorded[2, 3] = recorded[2, 4]
    assert not report_of(cli, *argv, *reference(tmp_path, recorded.float()), status=1)["passed"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("value", [-math.inf, -1e4, 3.0])
def test_padding_that_is_masked_is_named_where_zeros_were_asked_for(
    cli: Cli, tmp_path: Path, value: float, tp: int
) -> None:
    logits, argv = model(tmp_path)
    wide = torch.cat([logits, torch.full((2, 4, 16), value)], -1)
    given = [*argv, "--pad-vocab-to-multiple-of", 64, "--tp", tp, *reference(tmp_path, wide)]
    report = report_of(cli, *given, status=1)
    assert check(report, "logits-match")["mismatches"] == 2 * 4 * 16
    (found,) = report["diagnosis"]
    assert (found["fault"], found["match"]) == ("vocab-padded", "exact")
    assert "columns 48..63" in found["message"]


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("kind", ["input_lengths", "attention_mask"])
def test_what_lies_behind_the_real_tokens_is_written_and_judged_by_nobody(
    cli: Cli, tmp_path: Path, kind: str, cp: int
) -> None:
    made = torch.Generator().manual_seed(12)
    hidden, head = torch.randn(3, 8, 64, generator=made), torch.randn(40, 64, generator=made)
    lengths = torch.tensor([8, 3, 0])
    real = torch.arange(8) < lengths[:, None]
    tags = {"input_lengths": lengths, "attention_mask": real.long()}
    spoilt = hidden.clone()
    spoilt[1, 5] = math.nan
    index = torch.tensor([0, 1, 0])
    save(
        tmp_path / "payload.safetensors",
        teacher_full_hidden_states=spoilt,
        opd_full_teacher_index=index,
        **{kind: tags[kind]},
    )
    save(tmp_path / "a.safetensors", **{"lm_head.weight": head})
    save(tmp_path / "b.safetensors", **{"lm_head.weight": head.flip(0).contiguous()})
    logits = torch.stack([hidden[0] @ head.t(), hidden[1] @ head.flip(0).t(), hidden[2] @ head.t()])
    recorded = logits * real[..., None]  # an engine without padding leaves zeros
    out = tmp_path / f"out{cp}"
    argv = [
        tmp_path / "payload.safetensors", "--head", f"0={tmp_path / 'a.safetensors'}",
        "--head", f"1={tmp_path / 'b.safetensors'}", "--cp", cp,
    ]  # fmt: skip
    report = report_of(cli, *argv, *reference(tmp_path, recorded), "-o", out)
    assert check(report, "logits-match")["total"] == 11 * 40
    shown = cli("reconstruct", *argv, *reference(tmp_path, recorded)).out
    assert "13 positions behind the real tokens are not judged" in shown
    written = torch.full((3, 8, 40), math.nan)
    for rank in range(cp):
        name = (
            "teacher_logits.safetensors" if cp == 1 else f"teacher_logits.cp{rank}of2.safetensors"
        )
        own = load_file(out / name)["teacher_logits"]
        at = list(range(8)) if cp == 1 else [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        written[:, at] = own
    finite = torch.ones(3, 8, dtype=torch.bool)
    finite[1, 5] = False
    assert written[1, 5].isnan().all()
    assert torch.allclose(written[finite], logits[finite], atol=1e-4)
    recorded[1, 2, 7] += 1
    report = report_of(cli, *argv, *reference(tmp_path, recorded), status=1)
    (place,) = check(report, "logits-match")["first"]
    assert (place["sequence"], place["position"], place["column"]) == (1, 2, 7)


def test_a_shift_is_named_though_nothing_lies_behind_the_real_tokens(
    cli: Cli, tmp_path: Path
) -> None:
    made = torch.Generator().manual_seed(13)
    hidden, head = torch.randn(3, 12, 64, generator=made), torch.randn(40, 64, generator=made)
    lengths = torch.tensor([12, 7, 9])
    real = torch.arange(12) < lengths[:, None]
    payload = tmp_path / "payload.safetensors"
    save(payload, teacher_full_hidden_states=hidden, input_lengths=lengths)
    save(tmp_path / "head.safetensors", **{"lm_head.weight": head})
    recorded = torch.zeros(3, 12, 40)
    recorded[:, :-1] = ((hidden @ head.t()) * real[..., None])[:, 1:]
    argv = [payload, "--head", tmp_path / "head.safetensors"]
    report = report_of(cli, *argv, *reference(tmp_path, recorded), status=1)
    (found,) = report["diagnosis"]
    assert (found["fault"], found["match"]) == ("sequence-shifted", "exact")


def test_a_batch_without_a_real_token_is_nothing_to_check(cli: Cli, tmp_path: Path) -> None:
    logits, argv = model(tmp_path)
    hidden = load_file(tmp_path / "payload.safetensors")["teacher_full_hidden_states"]
    none = torch.zeros(2, dtype=torch.int64)
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden, input_lengths=none)
    done = cli("reconstruct", *argv, *reference(tmp_path, logits))
    assert (done.status, done.out) == (2, "")
    assert "nothing would be checked" in done.err


def test_padding_of_a_draft_vocabulary_is_refused_rather_than_ignored(
    cli: Cli, tmp_path: Path
) -> None:
    _, argv = model(tmp_path)
    save(tmp_path / "map.safetensors", d2t=torch.arange(7))
    given = ["--d2t", tmp_path / "map.safetensors", "--pad-vocab-to-multiple-of", 8]
    done = cli("reconstruct", *argv, *given)
    assert (done.status, done.out) == (2, "")
    assert "leave out one of the two" in done.err


def checkpoint(where: Path, config: Mapping[str, object], **tensors: Tensor) -> Path:
    save(where / "model.safetensors", **tensors)
    (where / "config.json").write_text(json.dumps(config))
    return where


@pytest.mark.parametrize(
    ("norm", "config"),
    [
        (torch.ones(17), {"rms_norm_eps": 1e-6}),
        (torch.ones(8, dtype=torch.int32), {"rms_norm_eps": 1e-6}),
        (torch.ones(8), {"rms_norm_eps": 0}),
        (torch.ones(8), {"rms_norm_eps": "1e-5"}),
    ],
)
def test_a_norm_that_nobody_asked_for_stops_nothing(
    cli: Cli, tmp_path: Path, norm: Tensor, config: Mapping[str, object]
) -> None:
    logits, argv = model(tmp_path)
    head = load_file(tmp_path / "head.safetensors")["lm_head.weight"]
    tensors = {"lm_head.weight": head, "model.norm.weight": norm}
    where = checkpoint(tmp_path / "model", config, **tensors)
    given = [argv[0], "--head", where]
    assert report_of(cli, *given, *reference(tmp_path, logits))["passed"]
    report = report_of(cli, *given, *reference(tmp_path, logits + 1), status=1)
    assert report["diagnosis"] == []
    if norm.dtype == torch.int32:
        done = cli("reconstruct", *given, "--norm", where)
        assert (done.status, done.out) == (2, "")
        assert "norm" in done.err


@pytest.mark.parametrize("case", ["gemma2", "one of two"])
def test_a_missing_norm_is_found_in_its_form_and_beside_the_head_that_is_used(
    cli: Cli, tmp_path: Path, case: str
) -> None:
    made = torch.Generator().manual_seed(3)
    hidden, head = 2 * torch.randn(3, 6, 64, generator=made), torch.randn(40, 64, generator=made)
    weight = 0.3 * torch.randn(64, generator=made)
    scale = 1 + weight if case == "gemma2" else weight
    wide = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * scale
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden)
    config = {"rms_norm_eps": 1e-6, "model_type": "gemma2" if case == "gemma2" else "llama"}
    tensors = {"lm_head.weight": head, "model.norm.weight": weight}
    where = checkpoint(tmp_path / "model", config, **tensors)
    argv: list[object] = [tmp_path / "payload.safetensors", "--head", where]
    if case == "one of two":
        save(
            tmp_path / "payload.safetensors",
            teacher_full_hidden_states=hidden,
            opd_full_teacher_index=torch.zeros(3, dtype=torch.int64),
        )
        other = save(
            tmp_path / "other.safetensors", **{"lm_head.weight": head.flip(0).contiguous()}
        )
        argv += ["--head", f"1={other}"]
    report = report_of(cli, *argv, *reference(tmp_path, wide @ head.t()), status=1)
    assert [found["fault"] for found in report["diagnosis"]] == ["norm-missing"]
