"""``opdtool verify-pack`` as users type it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Cli, Outcome


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Six rows with everything a batch may hold."""
    rng = np.random.default_rng(3)
    lengths = torch.tensor([7, 12, 1, 9, 5, 11])
    real = torch.arange(12) < lengths[:, None]
    path = tmp_path / "batch.safetensors"
    save_file(
        {
            "input_ids": torch.from_numpy(rng.integers(5, 900, (6, 12))) * real,
            "input_lengths": lengths,
            "token_mask": (torch.from_numpy(rng.random((6, 12))) < 0.7).float() * real,
            "sample_mask": torch.tensor([1, 1, 1, 0, 1, 1.0]),
            "advantages": torch.from_numpy(rng.standard_normal((6, 12))).float() * real,
            "hidden": torch.from_numpy(rng.standard_normal((6, 12, 5))).bfloat16(),
            "reward": torch.from_numpy(rng.standard_normal(6)).float(),
        },
        path,
    )
    return path


def report_of(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def checks(report: dict[str, Any], code: str, tensor: str | None = None) -> list[dict[str, Any]]:
    return [
        entry
        for entry in report["checks"]
        if entry["code"] == code and tensor in (None, entry["tensor"])
    ]


def packed(cli: Cli, batch: Path, folder: Path, *options: object) -> Path:
    out = folder / "packs"
    done = cli("pack", batch, "-o", out, "--force", *options)
    assert done.status == 0, done.err
    return out


def change(path: Path, name: str, value: Tensor) -> None:
    tensors = load_file(path)
    assert not torch.equal(tensors[name], value)
    save_file({**tensors, name: value.contiguous()}, path)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--cp", 2),
        ("--cp", 4, "--tail", "segment", "--pad-packed-multiple", 16),
        ("--cp", 2, "--max-tokens", 24),
        ("--tp", 4, "--sequence-parallel", "--fp8", "tensorwise"),
    ],
)
def test_what_pack_writes_passes_with_every_tensor_checked(
    cli: Cli, batch: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    out = packed(cli, batch, tmp_path, *options)
    outcome = cli("verify-pack", out, "--batch", batch, "--format", "json")
    report = report_of(outcome)
    assert outcome.status == 0, report
    for code, tensor in [
        ("OPD201", "input_ids"),
        ("OPD202", "target_ids"),
        ("OPD203", "position_ids"),
        ("OPD204", "advantages"),
        ("OPD204", "hidden"),
        ("OPD204", "token_mask"),
        ("OPD205", "reward"),
        ("OPD301", "draft_token_mask"),
    ]:
        assert [entry["status"] for entry in checks(report, code, tensor)] == ["pass"], code
    assert checks(report, "OPD209")[0]["status"] == "pass"
    assert report["geometry"]["sequences"] == 6


def test_options_that_contradict_the_manifest_are_an_error(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    out = packed(cli, batch, tmp_path, "--cp", 2)
    assert cli("verify-pack", out, "--batch", batch, "--cp", 2).status == 0
    for option, value in [("--cp", 4), ("--tp", 2), ("--pad-multiple", 8), ("--tail", "segment")]:
        outcome = cli("verify-pack", out, "--batch", batch, option, value)
        assert outcome.status == 2
        assert str(value) in outcome.err


def test_loose_files_need_no_manifest_and_may_be_given_in_rank_order(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    out = packed(cli, batch, tmp_path, "--cp", 2)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == 2
    assert cli("verify-pack", *reversed(files), "--batch", batch).status == 0
    plain = [tmp_path / name for name in ("first.safetensors", "second.safetensors")]
    for source, target in zip(files, plain, strict=True):
        target.write_bytes(source.read_bytes())
    assert cli("verify-pack", *plain, "--batch", batch, "--cp", 2).status == 0
    outcome = cli("verify-pack", *reversed(plain), "--batch", batch, "--cp", 2, "--format", "json")
    assert outcome.status == 1
    entry = report_of(outcome)["diagnosis"][0]
    assert (entry["fault"], entry["match"]) == ("cp-rank-swapped", "exact")
    assert "1, 0" in entry["message"]
    assert "input_ids" in entry["message"]
    assert "target_ids" in entry["message"]


def test_wrong_tokens_of_every_kind_are_located(cli: Cli, batch: Path, tmp_path: Path) -> None:
    for name, code in [
        ("input_ids", "OPD201"),
        ("target_ids", "OPD202"),
        ("position_ids", "OPD203"),
        ("advantages", "OPD204"),
        ("hidden", "OPD204"),
    ]:
        out = packed(cli, batch, tmp_path, "--cp", 2)
        path = out / "pack-00000.cp1of2.safetensors"
        value = load_file(path)[name].clone()
        value[0, 1] += 3  # rank 1 holds positions 2 3 4 5 of row 0
        change(path, name, value)
        outcome = cli("verify-pack", out, "--batch", batch, "--format", "json")
        assert outcome.status == 1
        (entry,) = checks(report_of(outcome), code, name)
        assert (entry["status"], entry["mismatches"]) == ("fail", 1)
        place = entry["first"][0]
        assert (place["sequence"], place["position"]) == (0, 3)
        assert (place["slot"], place["cp_rank"]) == (3, 1)
        assert report_of(outcome)["diagnosis"] == []


def test_padding_that_is_filled_otherwise_is_reported_and_not_failed(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    out = packed(cli, batch, tmp_path, "--pad-multiple", 4)
    path = out / "pack-00000.safetensors"
    ids = load_file(path)["input_ids"].clone()
    assert int(ids[0, 7]) == 0  # row 0 has 7 tokens in 8 slots
    ids[0, 7] = 99
    change(path, "input_ids", ids)
    outcome = cli("verify-pack", out, "--batch", batch, "--format", "json")
    assert outcome.status == 0
    (entry,) = checks(report_of(outcome), "OPD206", "input_ids")
    assert (entry["status"], entry["mismatches"]) == ("warn", 1)
    mask = load_file(path)["advantages"].clone()
    mask[0, 7] = 1.0
    change(path, "advantages", mask)
    outcome = cli("verify-pack", out, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    assert checks(report_of(outcome), "OPD204", "advantages")[0]["mismatches"] == 1


@pytest.mark.parametrize("value", [0, -100])
def test_targets_without_a_successor_may_be_ignored_but_not_of_elsewhere(
    cli: Cli, batch: Path, tmp_path: Path, value: int
) -> None:
    out = packed(cli, batch, tmp_path)
    path = out / "pack-00000.safetensors"
    targets = load_file(path)["target_ids"].clone()
    targets[0, 6] = value  # the last token of row 0
    change(path, "target_ids", targets)
    assert cli("verify-pack", out, "--batch", batch).status == 0
    targets[0, 6] = 4  # no token of the batch
    change(path, "target_ids", targets)
    outcome = cli("verify-pack", out, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    (entry,) = checks(report_of(outcome), "OPD208")
    assert (entry["mismatches"], entry["first"][0]["position"]) == (1, 6)


def test_rows_in_the_wrong_order_are_named_with_the_order(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    out = packed(cli, batch, tmp_path, "--cp", 2)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        del tensors["sequence_index"]
        save_file(tensors, path)
    rows = [3, 0, 5, 2, 4, 1]
    shuffled = tmp_path / "shuffled.safetensors"
    save_file({name: value[rows] for name, value in load_file(batch).items()}, shuffled)
    outcome = cli("verify-pack", out, "--batch", shuffled, "--format", "json", "--row-aligned",
                  "reward")  # fmt: skip
    assert outcome.status == 1
    entry = report_of(outcome)["diagnosis"][0]
    inverse = [rows.index(i) for i in range(6)]
    assert entry["fault"] == "rows-permuted"
    assert ", ".join(map(str, inverse)) in entry["message"]


def test_row_aligned_tensors_go_by_sequence_index(cli: Cli, batch: Path, tmp_path: Path) -> None:
    out = packed(cli, batch, tmp_path, "--max-tokens", 24)
    path = sorted(out.glob("*.safetensors"))[0]
    reward = load_file(path)["reward"]
    assert len(reward) > 1
    change(path, "reward", reward.flip(0))
    outcome = cli("verify-pack", out, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    assert checks(report_of(outcome), "OPD205", "reward")[0]["status"] == "fail"


def test_tensors_of_other_sizes_and_rows_in_two_packs_are_reported(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    out = packed(cli, batch, tmp_path, "--max-tokens", 24)
    files = sorted(out.glob("*.safetensors"))
    change(files[0], "advantages", load_file(files[0])["advantages"][:, :-1])
    outcome = cli("verify-pack", *files, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    assert checks(report_of(outcome), "OPD207", "advantages")[0]["status"] == "fail"
    again = tmp_path / "again.safetensors"
    again.write_bytes(files[1].read_bytes())
    outcome = cli("verify-pack", *files, again, "--batch", batch, "--format", "json")
    assert checks(report_of(outcome), "OPD209")[0]["status"] == "fail"
    outcome = cli("verify-pack", files[1], "--batch", batch, "--format", "json")
    assert outcome.status == 0
    assert checks(report_of(outcome), "OPD209")[0]["status"] == "warn"


def test_inputs_that_are_no_pack_are_refused(cli: Cli, batch: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    outcome = cli("verify-pack", path, "--batch", batch)
    assert outcome.status == 2
    assert "input_ids" in outcome.err
    save_file({"input_ids": torch.zeros(3, 4, dtype=torch.int64)}, path)
    outcome = cli("verify-pack", path, "--batch", batch)
    assert outcome.status == 2
    assert "[3, 4]" in outcome.err


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
def test_a_mask_in_another_dtype_is_the_same_mask_and_float_ids_are_no_ids(
    cli: Cli, batch: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    out = packed(cli, batch, tmp_path)
    path = out / "pack-00000.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "token_mask": tensors["token_mask"].to(dtype)}, path)
    assert cli("verify-pack", out, "--batch", batch).status == 0
    save_file({**tensors, "input_ids": tensors["input_ids"].double()}, path)
    outcome = cli("verify-pack", out, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    assert "F64" in checks(report_of(outcome), "OPD201")[0]["message"]


def test_targets_that_were_not_shifted_are_named_and_drawn(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    out = packed(cli, batch, tmp_path, "--cp", 2)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({**tensors, "target_ids": tensors["input_ids"].clone()}, path)
    outcome = cli("verify-pack", out, "--batch", batch)
    assert outcome.status == 1
    assert "targets-not-shifted" in outcome.out
    assert "First wrong sequence: target_ids, sequence 0, 7 tokens in 8 slots" in outcome.out
    rows = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines() if line.strip()}
    ids = load_file(batch)["input_ids"][0, :7].tolist()
    assert rows["actual"][:7] == [str(i) for i in ids]
    assert rows["expected"][:6] == [str(i) for i in ids[1:]]


def test_row_aligned_tensors_are_compared_as_they_are_stored(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    tensors = load_file(batch)
    tensors["row_id"] = torch.tensor([3, 7, 0, 5, 2, 2**53 + 1])
    tensors["kept"] = torch.tensor([True, False, True, True, True, False])
    save_file(tensors, batch)
    pack = packed(cli, batch, tmp_path) / "pack-00000.safetensors"
    right = load_file(pack)
    ids, kept, reward = right["row_id"], right["kept"], right["reward"]
    cases = [
        ("row_id", ids.clone(), True),
        ("row_id", ids + 0.7, False),
        ("row_id", ids.double(), False),  # which does not hold 2^53 + 1
        ("row_id", ids.to(torch.int16), False),
        ("row_id", ids.view(torch.uint64), True),
        ("row_id", ids - 2**40, False),
        ("kept", kept.to(torch.int32), True),
        ("kept", kept.float(), True),
        ("kept", kept.to(torch.int32) * 2, False),
        ("kept", -kept.to(torch.int32), False),
        ("reward", reward.double(), True),
        ("reward", reward.bfloat16(), False),
        ("reward", reward.double() + 1e-12, False),
    ]
    for name, stored, passes in cases:
        save_file({**right, name: stored.contiguous()}, pack)
        outcome = cli("verify-pack", pack, "--batch", batch, "--format", "json")
        (found,) = checks(report_of(outcome), "OPD205", name)
        assert found["status"] == ("pass" if passes else "fail"), (name, stored)
        assert outcome.status == (0 if passes else 1)


def test_an_index_of_no_row_is_a_failed_check_whatever_cp_is_promised(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    tensors = load_file(packed(cli, batch, tmp_path) / "pack-00000.safetensors")
    loose = tmp_path / "loose.safetensors"
    for entry in (99, -99):
        index = tensors["sequence_index"].clone()
        index[0] = entry
        kept = {n: t for n, t in tensors.items() if not n.startswith("cu_seqlens")}
        save_file(kept | {"sequence_index": index}, loose)
        outcome = cli("verify-pack", loose, "--batch", batch, "--cp", 2, "--format", "json")
        assert outcome.status == 1, outcome.err
        assert f"entry 0 is {entry}, outside" in checks(report_of(outcome), "OPD109")[0]["message"]


@pytest.mark.parametrize("offsets", [None, [0, 9, 15], [0, 6, 15]])
def test_shuffled_rows_are_named_whatever_the_offsets_tell(
    cli: Cli, tmp_path: Path, offsets: list[int] | None
) -> None:
    lengths = [9, 6]
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 99, (2, 9), generator=made)
    mask = torch.zeros(2, 9)
    mask[0, 4:9] = mask[1, 1:6] = 1
    mask[1, 3] = 0
    batch = tmp_path / "batch.safetensors"
    tensors = {"input_ids": ids, "token_mask": mask, "input_lengths": torch.tensor(lengths)}
    save_file(tensors, batch)
    packed_ids, packed_mask = torch.zeros(1, 24, dtype=torch.int64), torch.zeros(1, 24)
    for segment, row in enumerate([1, 0]):  # in segments of twelve slots
        at, length = 12 * segment, lengths[row]
        packed_ids[0, at : at + length] = ids[row, :length]
        packed_mask[0, at : at + length - 1] = mask[row, 1:length]
    told = {}
    if offsets is not None:
        told = {
            "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
            "cu_seqlens_padded": torch.tensor([0, 12, 24], dtype=torch.int32),
        }
    save_file({"draft_token_mask": packed_mask, **told}, tmp_path / "mask.safetensors")
    save_file({"input_ids": packed_ids, **told}, tmp_path / "pack.safetensors")
    geometry = ("--pad-multiple", 4, "--pad-packed-to", 24, "--format", "json")
    for command, file in (("verify-mask", "mask"), ("verify-pack", "pack")):
        argv = (command, tmp_path / f"{file}.safetensors", "--batch", batch)
        outcome = cli(*argv, *geometry)
        assert outcome.status == 1
        named = [found["fault"] for found in report_of(outcome)["diagnosis"]]
        assert named[:1] == ["rows-permuted"], (command, named)


def test_a_wrong_end_is_named_behind_a_tail_segment_too(
    cli: Cli, batch: Path, tmp_path: Path
) -> None:
    geometry = ("--cp", 2, "--tail", "segment", "--pad-packed-multiple", 32)
    pack = packed(cli, batch, tmp_path, *geometry)
    loose = tmp_path / "loose"
    loose.mkdir()
    for path in sorted(pack.glob("*.safetensors")):
        tensors = load_file(path)
        cu = tensors["cu_seqlens"].clone()
        assert len(cu) == 6 + 2
        assert cu[-1] == cu[-2]
        cu[-1] += 2
        save_file(tensors | {"cu_seqlens": cu}, loose / path.name)
    outcome = cli("verify-pack", loose, "--batch", batch, *geometry, "--format", "json")
    assert outcome.status == 1
    named = [found["fault"] for found in report_of(outcome)["diagnosis"]]
    assert named == ["cu-seqlens-wrong-end"]


def test_a_pack_of_no_slots_is_nothing_to_check(cli: Cli, batch: Path, tmp_path: Path) -> None:
    none = torch.zeros(1, 0, dtype=torch.int64)
    offsets = torch.zeros(1, dtype=torch.int32)
    save_file(
        {
            "input_ids": none,
            "target_ids": none.clone(),
            "cu_seqlens": offsets,
            "cu_seqlens_padded": offsets.clone(),
            "sequence_index": torch.zeros(0, dtype=torch.int64),
        },
        tmp_path / "empty.safetensors",
    )
    outcome = cli("verify-pack", tmp_path / "empty.safetensors", "--batch", batch)
    assert (outcome.status, outcome.out) == (2, "")
    assert "nothing was checked" in outcome.err
