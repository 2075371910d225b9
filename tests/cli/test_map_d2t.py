"""``opdtool map-d2t``: the columns, the ranks, the comparison, the refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli
from tests.reference import vocab as slow

B, S, V, D = 3, 5, 32, 8
IDS = [3, 4, 8, 9, 15, 20, 22, 31]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Logits, their map, what they become, and what misreadings of the map make."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(B, S, V, generator=rng)
    logits[0, 0, 3] = float("-inf")
    ids = torch.tensor(IDS)
    d2t = ids - torch.arange(D)
    save_file({"teacher_logits": logits}, tmp_path / "logits.safetensors")
    save_file({"d2t": d2t}, tmp_path / "d2t.safetensors")
    right = slow.mapped(logits.double().numpy(), d2t.tolist())
    for name, made in {
        "right": torch.from_numpy(right).float(),
        "absolute": logits[..., d2t],
        "zero": logits[..., :D],
        "arange": logits[..., 0 : 2 * D : 2],
    }.items():
        save_file({"teacher_logits": made.contiguous()}, tmp_path / f"{name}.safetensors")
    return tmp_path


def expected(data: Path) -> torch.Tensor:
    return load_file(data / "right.safetensors")["teacher_logits"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("memory", ["1GiB", "600"])
def test_under_every_tp_the_file_is_plain_indexing(
    cli: Cli, data: Path, tp: int, memory: str
) -> None:
    out = data / "out.safetensors"
    argv = ["--d2t", data / "d2t.safetensors", "-o", out, "--tp", tp, "--max-memory", memory]
    done = cli("map-d2t", data / "logits.safetensors", *argv)
    assert done.status == 0, done.err
    got = load_file(out)
    assert set(got) == {"teacher_logits"}
    assert torch.equal(got["teacher_logits"], expected(data))


def test_whole_logits_of_a_fixture_are_mapped_in_their_dtype(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    source, draft = fixtures / "teacher_logits.safetensors", fixtures / "draft"
    out = tmp_path / "out.safetensors"
    assert cli("map-d2t", source, "--d2t", draft, "-o", out, "--tp", 4).status == 0
    whole = load_file(source)["teacher_full_logits"]
    d2t = load_file(draft / "model.safetensors")["d2t"]
    want = slow.mapped(whole.double().numpy(), d2t.tolist())
    got = load_file(out)["teacher_logits"]
    assert got.dtype == whole.dtype
    np.testing.assert_array_equal(got.double().numpy(), want)
    checked = cli("map-d2t", source, "--d2t", draft, "--reference", source, "--tp", 2)
    assert checked.status == 0
    assert "OPD418" in checked.out


def compare(cli: Cli, data: Path, reference: str, *argv: object) -> tuple[int, dict[str, Any]]:
    words = ["--d2t", data / "d2t.safetensors", "--reference", data / reference, *argv]
    done = cli("map-d2t", data / "logits.safetensors", *words, "--format", "json")
    assert done.status in (0, 1), done.err
    return done.status, json.loads(done.out)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_right_reference_passes_and_a_wrong_value_is_placed(
    cli: Cli, data: Path, tp: int
) -> None:
    before = sorted(os.listdir(data))
    status, report = compare(cli, data, "right.safetensors", "--tp", tp)
    assert status == 0
    assert report["checks"][0]["total"] == B * S * D
    spoilt = expected(data)
    spoilt[2, 4, 6] += 1.0
    save_file({"teacher_logits": spoilt}, data / "wrong.safetensors")
    status, report = compare(cli, data, "wrong.safetensors", "--tp", tp)
    assert status == 1
    (check,) = report["checks"]
    assert (check["code"], check["mismatches"]) == ("OPD418", 1)
    place = check["first"][0]
    assert (place["sequence"], place["position"], place["draft_id"]) == (2, 4, 6)
    assert place["actual"] == pytest.approx(place["expected"] + 1.0)
    assert report["diagnosis"] == []
    assert compare(cli, data, "wrong.safetensors", "--atol", 1.1)[0] == 0
    assert sorted(os.listdir(data)) == sorted([*before, "wrong.safetensors"])


@pytest.mark.parametrize(
    ("reference", "fault"),
    [("absolute", "d2t-absolute"), ("zero", "d2t-all-zero"), ("arange", "d2t-arange")],
)
@pytest.mark.parametrize("memory", ["1GiB", "600"])
def test_a_reference_made_by_misreading_the_map_is_named(
    cli: Cli, data: Path, reference: str, fault: str, memory: str
) -> None:
    status, report = compare(cli, data, f"{reference}.safetensors", "--max-memory", memory)
    assert status == 1
    assert [each["fault"] for each in report["diagnosis"]] == [fault]
    assert report["diagnosis"][0]["match"] == "exact"


def test_nan_in_a_reference_never_passes(cli: Cli, data: Path) -> None:
    spoilt = expected(data)
    spoilt[0, 0, 1] = float("nan")
    save_file({"teacher_logits": spoilt}, data / "nan.safetensors")
    assert compare(cli, data, "nan.safetensors", "--atol", 100)[0] == 1


def test_columns_that_move_are_reported_and_bounded_by_each_ranks_share(
    cli: Cli, data: Path
) -> None:
    report = compare(cli, data, "right.safetensors", "--tp", 4)[1]
    # Ranks own 0..7, 8..15, 16..23, 24..31 and want 3 4 | 8 9 | 15 20 | 22 31.
    assert report["stats"]["columns_from_other_ranks"] == [0, 0, 1, 1]


@pytest.mark.slow
def test_spawned_ranks_write_the_same_bytes(cli: Cli, data: Path) -> None:
    argv = ["--d2t", data / "d2t.safetensors", "--tp", 2, "--max-memory", 600]
    logits = data / "logits.safetensors"
    assert cli("map-d2t", logits, *argv, "-o", data / "a.safetensors").status == 0
    spawned = cli("map-d2t", logits, *argv, "--ranks", "spawn", "-o", data / "b.safetensors")
    assert spawned.status == 0, spawned.err
    assert (data / "a.safetensors").read_bytes() == (data / "b.safetensors").read_bytes()
    assert not [name for name in os.listdir(data) if name.startswith(".")]


def test_what_cannot_be_done_is_refused_and_leaves_nothing(cli: Cli, data: Path) -> None:
    save_file({"d2t": torch.tensor([1, 99])}, data / "far.safetensors")
    save_file({"d2t": torch.zeros(7, dtype=torch.int64)}, data / "seven.safetensors")
    save_file({"teacher_logits": torch.zeros(B, S, D + 1)}, data / "wide.safetensors")
    both = {name: torch.zeros(1, 1, V) for name in ("teacher_logits", "teacher_full_logits")}
    save_file(both, data / "both.safetensors")
    save_file({"teacher_logits": torch.zeros(S, V)}, data / "flat.safetensors")
    save_file({"x": torch.zeros(S, V)}, data / "none.safetensors")
    before = sorted(os.listdir(data))
    logits, d2t, out = data / "logits.safetensors", data / "d2t.safetensors", data / "out"
    for argv, said in (
        ([logits, "--d2t", d2t], "give -o FILE"),
        (
            [logits, "--d2t", d2t, "-o", out, "--tp", 5],
            "vocabulary of 32 does not divide by --tp 5: 2",
        ),
        ([logits, "--d2t", data / "seven.safetensors", "-o", out, "--tp", 2], "7 does not divide"),
        ([logits, "--d2t", data / "far.safetensors", "-o", out], "stands for target id 100"),
        ([logits, "--d2t", d2t, "--reference", data / "wide.safetensors"], "is [3, 5, 9]"),
        ([data / "both.safetensors", "--d2t", d2t, "-o", out], "choose with --name"),
        ([data / "flat.safetensors", "--d2t", d2t, "-o", out], "[5, 32]; logits [B, S, V]"),
        ([data / "none.safetensors", "--d2t", d2t, "-o", out], "teacher_logits"),
        ([logits, "--d2t", d2t, "-o", out, "--max-memory", 100], "one position takes"),
        ([logits, "--d2t", d2t, "-o", d2t], "--force"),
        ([logits, "--d2t", d2t, "-o", out, "--atol", "inf"], "--atol"),
    ):
        done = cli("map-d2t", *argv)
        assert done.status == 2, (argv, done.out)
        assert said in done.err
    assert sorted(os.listdir(data)) == before
    both_named = cli(
        "map-d2t", data / "both.safetensors", "--d2t", d2t, "-o", out, "--name", "teacher_logits"
    )
    assert both_named.status == 0


def test_a_reference_may_have_its_own_names_and_both_widths(cli: Cli, data: Path) -> None:
    whole = load_file(data / "logits.safetensors")["teacher_logits"]
    both = {"teacher_full_logits": whole, "teacher_logits": expected(data)}
    save_file(both, data / "both.safetensors")
    assert compare(cli, data, "both.safetensors")[0] == 0
    save_file({"mine": expected(data)}, data / "named.safetensors")
    argv = ("map-d2t", data / "logits.safetensors", "--d2t", data / "d2t.safetensors")
    save_file({"other": whole}, data / "other.safetensors")
    done = cli(
        argv[0], data / "other.safetensors", *argv[2:], "--rename", "teacher_full_logits=other",
        "--reference", data / "named.safetensors", "--rename", "teacher_logits=mine",
    )  # fmt: skip
    assert done.status == 0, done.err
    done = cli(*argv, "--reference", data / "named.safetensors", "--rename", "teacher_logits=my")
    assert (done.status, done.out) == (2, "")
    assert "no input has a tensor my" in done.err
    save_file({name: whole.clone() for name in both}, data / "two.safetensors")
    done = cli(*argv, "--reference", data / "two.safetensors")
    assert (done.status, done.out) == (2, "")
    assert "give a file with the one to compare with" in done.err
