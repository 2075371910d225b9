"""``opdtool verify-mask`` as users type it: exit statuses, sentences, files, shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Cli, Outcome
from tests.reference import faults as slow
from tests.reference.faults import Dump, World

MASK = "draft_token_mask"


@pytest.fixture
def world() -> World:
    """Eight rows, CP 2, an absorbed tail, a dropped row."""
    rng = np.random.default_rng(5)
    lengths = [7, 12, 3, 9, 5, 11, 4, 6]
    ids = rng.integers(5, 900, size=(8, 12))
    mask = (rng.random((8, 12)) < 0.6).astype(np.float64)
    mask[:, 1:3] = 1.0
    return World(
        lengths=lengths,
        width=12,
        token_mask=mask,
        sample_mask=np.array([1, 1, 1, 0, 1, 1, 1, 1.0]),
        padded=[8, 12, 4, 12, 8, 12, 4, 12],
        cp=2,
        multiple=4,
        ids=ids,
    )


def write_batch(world: World, path: Path, **names: str) -> Path:
    tensors = {
        "input_ids": torch.from_numpy(world.ids),
        "input_lengths": torch.tensor(world.lengths),
        "token_mask": torch.from_numpy(world.token_mask).float(),
        "sample_mask": torch.from_numpy(world.sample_mask).float(),
    }
    save_file({names.get(name, name): value for name, value in tensors.items()}, path)
    return path


def write_dump(dump: Dump, folder: Path, stem: str = "mask", **more: Any) -> list[Path]:
    """One file a rank; ``more``: dtype, name, shape ("row", "flat", "column"), offsets, index."""
    ranks = len(dump.shards)
    paths = []
    for rank, shard in enumerate(dump.shards):
        tag = f".cp{rank}of{ranks}" if ranks > 1 else ""
        mask = torch.from_numpy(np.ascontiguousarray(shard)).to(more.get("dtype", torch.float32))
        shape = {"row": (1, -1), "flat": (-1,), "column": (-1, 1)}[more.get("shape", "row")]
        tensors: dict[str, Tensor] = {more.get("name", MASK): mask.reshape(shape)}
        if more.get("offsets", True):
            tensors["cu_seqlens"] = torch.tensor(dump.cu, dtype=torch.int32)
            tensors["cu_seqlens_padded"] = torch.tensor(dump.cu_padded, dtype=torch.int32)
        if "index" in more:
            tensors["sequence_index"] = torch.tensor(more["index"])
        path = folder / f"{stem}{tag}.safetensors"
        save_file(tensors, path)
        paths.append(path)
    return paths


def report_of(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def check(report: dict[str, Any], code: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in report["checks"] if c["code"] == code)
    return found


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", ["row", "flat", "column"])
def test_a_right_mask_passes_in_every_shape_and_dtype(
    cli: Cli, tmp_path: Path, world: World, dtype: torch.dtype, shape: str
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    dump = write_dump(slow.right(world), tmp_path, dtype=dtype, shape=shape)
    outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
    assert outcome.status == 0
    report = report_of(outcome)
    assert report["geometry"] == {"tp": 1, "cp": 2, "sequences": 8, "packed_tokens": 72}
    assert check(report, "OPD301")["status"] == "pass"
    assert check(report, "OPD301")["mismatches"] == 0
    assert check(report, "OPD301")["total"] == 72
    assert report["diagnosis"] == []


def test_a_mask_that_was_not_shifted_is_located_named_and_drawn(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    bad, right = next(slow.mask_not_shifted(world)), slow.right(world)
    dump = write_dump(bad, tmp_path)
    outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    report = report_of(outcome)
    finding = check(report, "OPD301")
    wrong = sum(int((a != b).sum()) for a, b in zip(bad.shards, right.shards, strict=True))
    assert (finding["status"], finding["mismatches"], finding["total"]) == ("fail", wrong, 72)
    assert len(finding["first"]) == min(10, wrong)
    whole_bad, whole_right = slow.unrolled(world), slow.right_pack(world)
    for place in finding["first"]:
        slot = place["slot"]
        row = max(b for b in range(8) if world.starts[b] <= slot)
        assert (place["sequence"], place["position"]) == (row, slot - world.starts[row])
        assert (place["expected"], place["actual"]) == (whole_right[slot], whole_bad[slot])
        held = slow.windows(world.padded[row], place["cp_rank"], 2)
        assert place["position"] in held
    entry = report["diagnosis"][0]
    assert (entry["fault"], entry["match"]) == ("mask-not-shifted", "exact")
    assert entry["message"]
    assert entry["fix"]
    full = cli("verify-mask", *dump, "--batch", batch)
    assert full.status == 1
    assert "First wrong sequence: sequence 0" in full.out
    assert "expected" in full.out
    assert "^" in full.out
    for style in ("concise", "github", "markdown"):
        told = cli("verify-mask", *dump, "--batch", batch, "--format", style)
        assert told.status == 1
        assert "mask-not-shifted" in told.out
    assert cli("verify-mask", *dump, "--batch", batch, "--exit-zero", "-q").status == 0


def test_token_ids_around_a_mismatch_are_shown(cli: Cli, tmp_path: Path, world: World) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    shards = [shard.copy() for shard in slow.right(world).shards]
    shards[0][2] = 1.0 - shards[0][2]  # rank 0 holds positions 0 1 6 7 of row 0
    dump = write_dump(Dump(shards, world.cu, world.starts), tmp_path)
    outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
    place = check(report_of(outcome), "OPD301")["first"][0]
    assert (place["sequence"], place["position"], place["cp_rank"]) == (0, 6, 0)
    ids = [int(i) for i in world.ids[0, 3:7]]
    assert place["token_ids"] == f"{ids[0]} {ids[1]} {ids[2]} [{ids[3]}]"
    assert report_of(outcome)["diagnosis"] == []


def test_one_file_of_the_whole_pack_is_the_global_mask_whatever_cp(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    whole = Dump([slow.right_pack(world)], world.cu, world.starts)
    path = write_dump(whole, tmp_path)
    for cp in (1, 2):
        assert cli("verify-mask", *path, "--batch", batch, "--cp", cp).status == 0
    bad = Dump([slow.unrolled(world)], world.cu, world.starts)
    path = write_dump(bad, tmp_path, stem="bad")
    outcome = cli("verify-mask", *path, "--batch", batch, "--cp", 2, "--format", "json")
    assert outcome.status == 1
    assert report_of(outcome)["diagnosis"][0]["fault"] == "mask-not-shifted"
    ranks = {place["cp_rank"] for place in check(report_of(outcome), "OPD301")["first"]}
    assert ranks == {0, 1}


def test_offsets_come_from_the_geometry_where_the_dump_has_none(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    dump = write_dump(slow.right(world), tmp_path, offsets=False)
    asked = ("verify-mask", *dump, "--batch", batch, "--cp", 2)
    assert cli(*asked, "--pad-packed-to", 72).status == 0
    outcome = cli(*asked, "--format", "json")  # without the tail there are 68 slots
    assert outcome.status == 1
    assert "68" in check(report_of(outcome), "OPD107")["message"]


@pytest.mark.parametrize(
    ("names", "options", "sentence"),
    [
        (["m.cp0of2"], [], "rank 1 (.cp1of2) is missing"),
        (["m.cp0of2", "m.cp1of2"], ["--cp", "4"], "contradicts --cp 4"),
        (["m.cp0of2", "m.cp1of2", "n.cp0of2"], [], "1 of 2 context-parallel files"),
        (["m.cp0of2", "m.cp2of2"], [], "no rank 2 of 2"),
        (["m.cp0of2", "whole"], [], "not both"),
        (["m0", "m1", "m2"], ["--cp", "2"], "3 files for --cp 2"),
        (["half"], ["--cp", "2"], "give 2 files"),
        (["m.cp0of2", "m.cp0of2"], [], "twice"),
    ],
)
def test_files_that_are_no_whole_packs_are_refused(
    cli: Cli, tmp_path: Path, world: World, names: list[str], options: list[str], sentence: str
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    shards = slow.right(world).shards
    paths = []
    for i, name in enumerate(names):
        path = tmp_path / f"{name}.safetensors"
        save_file(
            {
                MASK: torch.from_numpy(shards[i % 2]).float(),
                "cu_seqlens_padded": torch.tensor(world.starts, dtype=torch.int32),
            },
            path,
        )
        paths.append(path)
    outcome = cli("verify-mask", *paths, "--batch", batch, *options)
    assert outcome.status == 2
    assert sentence in outcome.err
    assert len(outcome.err.strip().splitlines()) <= 2


def test_other_shapes_are_an_error_that_says_which_was_found(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    path = tmp_path / "m.safetensors"
    save_file({MASK: torch.zeros(2, 36)}, path)
    outcome = cli("verify-mask", path, "--batch", batch)
    assert outcome.status == 2
    assert "[2, 36]" in outcome.err
    assert "[1,T], [T] or [T,1]" in outcome.err


def test_names_are_the_users_own(cli: Cli, tmp_path: Path, world: World) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors", token_mask="loss_mask")
    dump = write_dump(slow.right(world), tmp_path, name="labels_mask")
    asked = ("verify-mask", *dump, "--batch", batch)
    missing = cli(*asked, "--rename", "token_mask=loss_mask")
    assert missing.status == 2
    assert MASK in missing.err
    assert "labels_mask" in missing.err
    good = cli(*asked, "--rename", "token_mask=loss_mask", "--mask-name", "labels_mask")
    assert good.status == 0
    good = cli(*asked, "--rename", "token_mask=loss_mask", "--rename", f"{MASK}=labels_mask")
    assert good.status == 0
    nowhere = cli(*asked, "--rename", "token_mask=loss_mask", "--mask-name", "labels_mask",
                  "--rename", "sample_mask=nothing")  # fmt: skip
    assert nowhere.status == 2
    assert "nothing" in nowhere.err


def test_a_batch_without_a_token_mask_is_refused(cli: Cli, tmp_path: Path, world: World) -> None:
    batch = tmp_path / "b.safetensors"
    save_file({"input_ids": torch.from_numpy(world.ids)}, batch)
    dump = write_dump(slow.right(world), tmp_path)
    outcome = cli("verify-mask", *dump, "--batch", batch)
    assert outcome.status == 2
    assert "token_mask" in outcome.err


def test_a_part_of_the_batch_is_found_by_sequence_index(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    rows = [5, 0, 3]
    part = World(
        lengths=[world.lengths[i] for i in rows],
        width=12,
        token_mask=world.token_mask[rows],
        sample_mask=world.sample_mask[rows],
        padded=[12, 8, 12],
        cp=2,
        multiple=4,
    )
    dump = write_dump(slow.right(part), tmp_path, index=rows)
    assert cli("verify-mask", *dump, "--batch", batch).status == 0
    bad = write_dump(next(slow.sample_mask_ignored(part)), tmp_path, stem="bad", index=rows)
    outcome = cli("verify-mask", *bad, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    report = report_of(outcome)
    assert report["diagnosis"][0]["fault"] == "sample-mask-ignored"
    place = check(report, "OPD301")["first"][0]
    assert (place["sequence"], place["segment"]) == (3, 2)
    without = write_dump(slow.right(part), tmp_path, stem="without")
    outcome = cli("verify-mask", *without, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    assert "sequence_index" in check(report_of(outcome), "OPD104")["message"]


def test_both_conventions_and_further_shifts(cli: Cli, tmp_path: Path, world: World) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    unshifted = write_dump(slow.dump(world, slow.unrolled(world)), tmp_path, stem="u")
    asked = ("verify-mask", *unshifted, "--batch", batch)
    assert cli(*asked).status == 1
    assert cli(*asked, "--convention", "unshifted").status == 0
    rolled = write_dump(slow.right(world), tmp_path, stem="r")
    outcome = cli("verify-mask", *rolled, "--batch", batch, "--convention", "unshifted",
                  "--format", "json")  # fmt: skip
    assert outcome.status == 1
    assert report_of(outcome)["diagnosis"][0]["fault"] == "mask-shifted"
    twice = write_dump(slow.right(world, shift=2), tmp_path, stem="t")
    assert cli("verify-mask", *twice, "--batch", batch, "--shift", 2).status == 0
    outcome = cli("verify-mask", *rolled, "--batch", batch, "--shift", 2, "--format", "json")
    assert outcome.status == 1
    assert report_of(outcome)["diagnosis"][0]["fault"] == "mask-not-shifted"
    both = cli(*asked, "--convention", "unshifted", "--shift", 2)
    assert both.status == 2
    assert "--shift 2" in both.err


def test_a_tolerance_is_only_given_when_it_is_asked_for(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    right = slow.right(world)
    near = Dump([shard + 1e-3 for shard in right.shards], right.cu, right.cu_padded)
    dump = write_dump(near, tmp_path)
    assert cli("verify-mask", *dump, "--batch", batch).status == 1
    assert cli("verify-mask", *dump, "--batch", batch, "--atol", "0.002").status == 0


def test_values_that_are_not_finite_or_not_a_weight_are_reported(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    shards = [shard.copy() for shard in slow.right(world).shards]
    shards[0][0], shards[1][1] = np.nan, 255.0
    dump = write_dump(Dump(shards, world.cu, world.starts), tmp_path)
    outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
    report = report_of(outcome)
    assert outcome.status == 1
    assert check(report, "OPD304")["mismatches"] == 1
    assert check(report, "OPD304")["first"][0]["actual"] == "nan"
    assert check(report, "OPD305")["mismatches"] == 1
    assert check(report, "OPD305")["first"][0]["actual"] == 255.0
    assert report["diagnosis"] == []


def test_weights_of_the_batch_are_no_strange_values(cli: Cli, tmp_path: Path, world: World) -> None:
    weighted = World(
        lengths=world.lengths,
        width=12,
        token_mask=world.token_mask * 0.5,
        sample_mask=world.sample_mask,
        padded=world.padded,
        cp=2,
        multiple=4,
        ids=world.ids,
    )
    batch = write_batch(weighted, tmp_path / "b.safetensors")
    dump = write_dump(slow.right(weighted), tmp_path)
    assert cli("verify-mask", *dump, "--batch", batch).status == 0
    bad = write_dump(next(slow.mask_not_shifted(weighted)), tmp_path, stem="bad")
    report = report_of(cli("verify-mask", *bad, "--batch", batch, "--format", "json"))
    assert check(report, "OPD305")["status"] == "pass"
    assert report["diagnosis"][0]["fault"] == "mask-not-shifted"


def test_warnings_do_not_fail(cli: Cli, tmp_path: Path) -> None:
    batch = tmp_path / "b.safetensors"
    save_file({"token_mask": torch.zeros(2, 4), "input_ids": torch.ones(2, 4).long()}, batch)
    path = tmp_path / "m.safetensors"
    save_file({MASK: torch.zeros(1, 8)}, path)
    outcome = cli("verify-mask", path, "--batch", batch, "--format", "json")
    assert outcome.status == 0
    report = report_of(outcome)
    assert check(report, "OPD309")["status"] == "warn"
    assert check(report, "OPD310")["status"] == "warn"
    assert "0, 1" in check(report, "OPD310")["message"]


def test_a_directory_of_microbatches_is_checked_whole(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    made = cli("pack", batch, "-o", tmp_path / "p", "--cp", 2, "--max-tokens", 24)
    assert made.status == 0
    asked = ("verify-mask", tmp_path / "p", "--batch", batch, "--format", "json")
    outcome = cli(*asked)
    report = report_of(outcome)
    assert outcome.status == 0
    assert report["stats"]["packs"] >= 3
    assert report["geometry"]["sequences"] == 8
    assert cli(*asked, "--cp", 4).status == 2
    for path in (tmp_path / "p").glob("pack-*.safetensors"):
        tensors = load_file(path)
        weights = tensors["token_mask"].clone()
        tensors[MASK] = weights
        save_file(tensors, path)
    outcome = cli(*asked)
    report = report_of(outcome)
    assert outcome.status == 1
    faults = report["diagnosis"][0]
    assert faults["faults"] == ["mask-not-shifted", "sample-mask-ignored"]
    assert check(report, "OPD301")["first"][0]["pack"].startswith("pack-0000")


def test_ranks_that_disagree_about_the_layout_are_reported(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    dump = write_dump(slow.right(world), tmp_path)
    tensors = load_file(dump[1])
    tensors["cu_seqlens"] = tensors["cu_seqlens"] // 2
    save_file(tensors, dump[1])
    outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    assert check(report_of(outcome), "OPD110")["status"] == "fail"


@pytest.mark.parametrize(
    "fault", ["cu-seqlens-swapped", "cu-seqlens-divided-by-cp", "cu-seqlens-wrong-end"]
)
def test_a_fault_of_the_offsets_is_one_failure_and_not_also_one_of_the_content(
    cli: Cli, tmp_path: Path, world: World, fault: str
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    dump = write_dump(next(slow.MASK_FAULTS[fault](world)), tmp_path)
    outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
    report = report_of(outcome)
    assert outcome.status == 1
    assert report["diagnosis"][0]["fault"] == fault
    assert check(report, "OPD301")["status"] == "pass"


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0.0, 8.0]),
        torch.zeros(2, 5, dtype=torch.int32),
        torch.tensor([], dtype=torch.int32),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.tensor([0, 8, 72], dtype=torch.uint8),
    ],
)
def test_offsets_of_any_kind_are_judged_and_never_an_internal_error(
    cli: Cli, tmp_path: Path, world: World, bad: Tensor
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        dump = write_dump(slow.right(world), tmp_path)
        for path in dump:
            save_file({**load_file(path), name: bad}, path)
        outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
        assert outcome.status == 1, outcome.err


@pytest.mark.slow
def test_a_mask_of_two_hundred_million_slots_takes_bounded_memory(tmp_path: Path) -> None:
    rows, width = 50_000, 4096
    batch, dump = tmp_path / "b.safetensors", tmp_path / "m.safetensors"
    mask = torch.zeros(rows, width, dtype=torch.bool)
    mask[:, 1000:] = True
    save_file({"token_mask": mask}, batch)
    rolled = torch.zeros_like(mask)
    rolled[:, :-1] = mask[:, 1:]
    assert rolled.numel() > 200_000_000
    save_file({MASK: rolled.reshape(1, -1)}, dump)
    del mask, rolled
    code = (
        "import resource, sys\n"
        "import torch, opdtool.jobs.verify_mask\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "from opdtool.cli.main import run\n"
        f"status = run(['verify-mask', {str(dump)!r}, '--batch', {str(batch)!r}, '-q'])\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(status, (after - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, grown = done.stdout.split()
    assert status == "0"
    assert int(grown) < 200, f"{grown} MiB"


def test_ranks_of_different_sizes_are_reported_and_not_diagnosed(
    cli: Cli, tmp_path: Path, world: World
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    dump = write_dump(slow.right(world), tmp_path)
    tensors = load_file(dump[1])
    save_file({**tensors, MASK: tensors[MASK][:, :-1].contiguous()}, dump[1])
    outcome = cli("verify-mask", *dump, "--batch", batch, "--format", "json")
    report = report_of(outcome)
    assert outcome.status == 1
    assert check(report, "OPD302")["status"] == "fail"
    assert "36, 35" in check(report, "OPD302")["message"]
    assert check(report, "OPD309")["status"] == "skip"


def test_a_mask_without_slots_is_nothing_to_check_or_too_short(cli: Cli, tmp_path: Path) -> None:
    batch, path = tmp_path / "b.safetensors", tmp_path / "m.safetensors"
    save_file({MASK: torch.zeros(1, 0)}, path)
    save_file({"token_mask": torch.ones(2, 4), "input_lengths": torch.tensor([0, 0])}, batch)
    outcome = cli("verify-mask", path, "--batch", batch)
    assert outcome.status == 2
    assert "nothing was checked" in outcome.err
    save_file({"token_mask": torch.ones(2, 4)}, batch)
    outcome = cli("verify-mask", path, "--batch", batch, "--format", "json")
    assert outcome.status == 1
    assert report_of(outcome)["diagnosis"] == []


@pytest.mark.parametrize("entry", [99, -99, -1])
def test_an_index_of_no_row_is_a_failed_check_where_files_are_told_by_their_slots(
    cli: Cli, tmp_path: Path, world: World, entry: int
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    index = torch.arange(len(world.lengths))
    index[0] = entry
    mask = torch.as_tensor(np.asarray(slow.right_pack(world))).reshape(1, -1).float()
    path = tmp_path / "mask.safetensors"
    save_file({"draft_token_mask": mask, "sequence_index": index}, path)
    outcome = cli("verify-mask", path, "--batch", batch, "--cp", 2, "--format", "json")
    assert outcome.status == 1, outcome.err
    found = check(report_of(outcome), "OPD109")
    assert found["status"] == "fail"
    assert f"entry 0 is {entry}, outside" in found["message"]


@pytest.mark.parametrize("atol", ["inf", "nan", "-1"])
def test_a_tolerance_that_none_can_exceed_is_refused(
    cli: Cli, tmp_path: Path, world: World, atol: str
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    dump = write_dump(slow.right(world), tmp_path)
    outcome = cli("verify-mask", *dump, "--batch", batch, f"--atol={atol}")
    assert outcome.status == 2
    assert outcome.err.startswith(f"error: --atol is {float(atol)}; it must be a finite number")


def test_inputs_are_named_as_they_were_typed(
    cli: Cli, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = write_batch(world, tmp_path / "b.safetensors")
    (tmp_path / "dump").mkdir()
    assert write_dump(slow.right(world), tmp_path / "dump")
    monkeypatch.chdir(tmp_path / "dump")
    for folder in (".", "../dump"):
        outcome = cli("verify-mask", folder, "--batch", batch)
        assert outcome.status == 0, outcome.err
        assert outcome.out.splitlines()[0] == f"opdtool verify-mask  {folder}"
