"""What a dtype rounds away is told from what is wrong, wherever it was rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from opdtool.core.bounds import precision_behind
from tests.cli.conftest import Cli
from tests.cli.test_reconstruct import check, report_of, save


def model(where: Path, dtype: torch.dtype, H: int = 64, V: int = 256) -> tuple[Tensor, list[str]]:
    """A payload and a head in a dtype; the logits in float64, and how both are passed."""
    made = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 8, H, generator=made).to(dtype)
    head = (torch.randn(V, H, generator=made) * 5 / H**0.5).to(dtype)
    save(where / "payload.safetensors", teacher_full_hidden_states=hidden)
    save(where / "head.safetensors", **{"lm_head.weight": head})
    argv = [str(where / "payload.safetensors"), "--head", str(where / "head.safetensors")]
    return hidden.double() @ head.double().t(), argv


@pytest.mark.parametrize("behind", [(), ("--logit-softcap", "9"), ("--logit-scale", "0.3")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_written_equals_what_is_rebuilt(
    cli: Cli, tmp_path: Path, dtype: torch.dtype, behind: tuple[str, ...]
) -> None:
    _, argv = model(tmp_path, dtype, H=512)
    out = tmp_path / "out"
    report_of(cli, *argv, *behind, "-o", out)
    written = load_file(out / "teacher_logits.safetensors")["teacher_logits"]
    assert written.dtype == dtype
    for tolerance in ((), ("--atol", "0")):
        report = report_of(cli, *argv, *behind, "--reference", out, *tolerance)
        figures = report["stats"]["reference"]
        assert figures["equal"] is True
        assert figures["max_abs_error"]["value"] == 0
        assert figures["top1_agreement"] == 1
        assert figures["max_logprob_error"]["value"] < 1e-5
    again = tmp_path / "again"
    report_of(cli, *argv, *behind, "-o", again, "--reference", out)
    assert (
        load_file(again / "teacher_logits.safetensors")["teacher_logits"] - written
    ).abs().max() <= torch.finfo(dtype).eps * written.abs().max()
    # The next number up is not what was written.
    wrong = written.clone()
    wrong[1, 3, 17] = torch.nextafter(written[1, 3, 17], torch.tensor(1e4, dtype=dtype))
    save(tmp_path / "wrong.safetensors", teacher_logits=wrong)
    reference = ("--reference", tmp_path / "wrong.safetensors", "--atol", "0")
    report = report_of(cli, *argv, *behind, *reference, status=1)
    found = check(report, "logits-match")
    assert found["mismatches"] == 1
    assert (found["first"][0]["position"], found["first"][0]["column"]) == (3, 17)


@pytest.mark.parametrize("scale", [None, 0.37])
@pytest.mark.parametrize("cap", [None, 4.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_that_were_widened_before_they_were_transformed_agree(
    cli: Cli, tmp_path: Path, dtype: torch.dtype, cap: float | None, scale: float | None
) -> None:
    exact, argv = model(tmp_path, dtype)
    logits = exact.to(dtype).float()
    assert (logits - exact).abs().max() > 2e-3
    if scale is not None:
        logits, argv = logits * scale, [*argv, "--logit-scale", str(scale)]
    if cap is not None:
        logits, argv = cap * torch.tanh(logits / cap), [*argv, "--logit-softcap", str(cap)]
    save(tmp_path / "ref.safetensors", teacher_full_logits=logits)
    report = report_of(cli, *argv, "--reference", tmp_path / "ref.safetensors")
    name = str(dtype).removeprefix("torch.")
    assert report["stats"]["reference"]["precision"] == name
    # A wrong logit is noticed beside the rounding.
    logits[1, 2, 3] = 1.3 * logits[1, 2, 3] if abs(logits[1, 2, 3]) > 0.1 else 1.0
    save(tmp_path / "ref.safetensors", teacher_full_logits=logits)
    report = report_of(cli, *argv, "--reference", tmp_path / "ref.safetensors", status=1)
    assert check(report, "logits-match")["mismatches"] == 1


def test_no_narrow_precision_is_seen_where_none_was() -> None:
    made = torch.Generator().manual_seed(5)
    logits = torch.randn(4000, generator=made) * 5
    for values in (logits, 30 * torch.tanh(0.4 * logits / 30)):
        assert precision_behind(values, scale=0.4, softcap=30.0) == torch.float32


def test_bfloat16_logits_in_a_float16_file_agree(cli: Cli, tmp_path: Path) -> None:
    exact, argv = model(tmp_path, torch.bfloat16)
    logits = exact.bfloat16()
    logits = logits.half()
    assert (logits.double() - exact).abs().max() > 8 * 2**-11 * 2
    save(tmp_path / "ref.safetensors", teacher_full_logits=logits)
    report = report_of(cli, *argv, "--reference", tmp_path / "ref.safetensors")
    assert report["stats"]["reference"]["dtype"] == "float16"
    assert report["stats"]["reference"]["precision"] == "bfloat16"


def test_float16_logits_that_overflowed_before_they_were_widened_agree(
    cli: Cli, tmp_path: Path
) -> None:
    hidden = torch.full((1, 2, 4), 200.0).half()
    head = torch.tensor([[100.0] * 4, [1.0] * 4]).half()
    save(tmp_path / "payload.safetensors", teacher_full_hidden_states=hidden)
    save(tmp_path / "head.safetensors", **{"lm_head.weight": head})
    logits = torch.tensor([torch.inf, 800.0]).expand(1, 2, 2)
    save(tmp_path / "ref.safetensors", teacher_full_logits=logits)
    report = report_of(
        cli, tmp_path / "payload.safetensors", "--head", tmp_path / "head.safetensors",
        "--reference", tmp_path / "ref.safetensors", status=1,
    )  # fmt: skip
    assert check(report, "logits-match")["mismatches"] == 0
    assert check(report, "logits-finite")["status"] == "fail"
