"""``opdtool pack``: its files, value by value, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli
from tests.reference import packing as slow

Tensors = Mapping[str, torch.Tensor]
TOKEN_ALIGNED = ("advantages", "input_ids", "token_mask")
ROW_ALIGNED = ("idx", "input_lengths", "sample_mask", "total_reward")


def small_batch(lengths: list[int], width: int = 12, **more: torch.Tensor) -> dict[str, Any]:
    """A batch of these lengths with ids 100 * row + position + 1."""
    rows = len(lengths)
    ids = 100 * torch.arange(rows)[:, None] + torch.arange(width) + 1
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids * real,
        "input_lengths": torch.tensor(lengths),
        "token_mask": (real & (torch.arange(width) > 1)).float(),
        "sample_mask": torch.ones(rows),
    } | more


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def read_packs(directory: Path, cp: int) -> list[list[dict[str, torch.Tensor]]]:
    """Every microbatch's files in rank order."""
    count = len(list(directory.glob("pack-*.safetensors"))) // cp
    return [
        [
            load_file(directory / f"pack-{m:05d}{f'.cp{r}of{cp}' if cp > 1 else ''}.safetensors")
            for r in range(cp)
        ]
        for m in range(count)
    ]


def expect_pack(batch: Tensors, shards: list[dict[str, torch.Tensor]], cp: int) -> None:
    """Assert that one microbatch's files are what the slow reference makes of the batch."""
    first = shards[0]
    rows = first["sequence_index"].tolist()
    cu, cu_padded = first["cu_seqlens"].tolist(), first["cu_seqlens_padded"].tolist()
    assert np.diff(cu)[: len(rows)].tolist() == batch["input_lengths"][rows].tolist()
    draft = slow.draft_mask(
        batch["token_mask"][rows].numpy(), batch["sample_mask"][rows].numpy(), cu, cu_padded
    )
    for rank, shard in enumerate(shards):
        for name in TOKEN_ALIGNED:
            if name in batch:
                want = slow.pack(batch[name][rows].numpy(), cu, cu_padded, rank, cp)
                assert shard[name].dtype == batch[name].dtype
                assert shard[name][0].tolist() == want.tolist(), name
        ids = batch["input_ids"][rows].numpy()
        targets = slow.pack(ids, cu, cu_padded, rank, cp, shift=-1)
        assert shard["target_ids"][0].tolist() == targets.tolist()
        assert shard["target_ids"].dtype == batch["input_ids"].dtype
        assert shard["position_ids"][0].tolist() == slow.positions(cu_padded, rank, cp)
        assert shard["position_ids"].dtype == torch.int64
        window = slow.pack(draft[None], (0, len(draft)), (0, len(draft)))
        assert window.tolist() == draft.tolist()
        mine = [
            draft[begin + p]
            for begin, end in pairwise(cu_padded)
            for p in slow.zigzag_positions(end - begin, rank, cp)
        ]
        assert shard["draft_token_mask"][0].tolist() == mine
        for name in ROW_ALIGNED:
            if name in batch:
                assert shard[name].tolist() == batch[name][rows].tolist()
        assert shard["cu_seqlens"].dtype == shard["cu_seqlens_padded"].dtype == torch.int32
        assert shard["sequence_index"].dtype == torch.int64


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [None, 256])
def test_packs_of_the_fixtures_equal_the_slow_reference_and_unpack_to_the_batch(
    cli: Cli, fixtures: Path, tmp_path: Path, tp: int, cp: int, max_tokens: int | None
) -> None:
    batch = load_file(fixtures / "batch.safetensors")
    argv = ["--tp", tp, "--cp", cp, "--sequence-parallel"]
    argv += [] if max_tokens is None else ["--max-tokens", max_tokens]
    done = cli("pack", fixtures / "batch.safetensors", "-o", tmp_path / "packs", *argv)
    assert done.status == 0, done.err
    packs = read_packs(tmp_path / "packs", cp)
    assert len(packs) == 1 if max_tokens is None else len(packs) > 1
    multiple = (2 * cp if cp > 1 else 1) * tp
    for shards in packs:
        padded = np.diff(shards[0]["cu_seqlens_padded"].numpy())
        lengths = np.diff(shards[0]["cu_seqlens"].numpy()).tolist()
        assert padded.tolist() == [slow.pad_length(n, multiple) for n in lengths]
        assert max_tokens is None or padded.sum() <= max_tokens
        expect_pack(batch, shards, cp)
    rows = [row for shards in packs for row in shards[0]["sequence_index"].tolist()]
    assert sorted(rows) == list(range(len(batch["input_ids"])))

    done = cli("unpack", tmp_path / "packs", "-o", tmp_path / "back.safetensors")
    assert done.status == 0, done.err
    back = load_file(tmp_path / "back.safetensors")
    real = torch.arange(96) < batch["input_lengths"][:, None]
    assert set(back) == set(batch)
    for name, value in batch.items():
        want = value * real if name in TOKEN_ALIGNED else value
        assert torch.equal(back[name], want), name


def test_a_row_larger_than_the_memory_is_packed_in_column_slices(cli: Cli, tmp_path: Path) -> None:
    batch = small_batch([900, 3, 777], width=900)
    save(tmp_path / "b.safetensors", batch)
    for memory, out in (("1GiB", "whole"), ("9KiB", "slices")):
        argv = ["--cp", 2, "--max-memory", memory]
        assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / out, *argv).status == 0
    for name in ("pack-00000.cp0of2.safetensors", "pack-00000.cp1of2.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "slices" / name).read_bytes()
    expect_pack(batch, read_packs(tmp_path / "slices", 2)[0], 2)
    argv = ["-o", tmp_path / "back.safetensors", "--max-memory", "9KiB"]
    assert cli("unpack", tmp_path / "slices", *argv).status == 0
    assert torch.equal(load_file(tmp_path / "back.safetensors")["input_ids"], batch["input_ids"])


def test_further_dimensions_and_dtypes_are_carried_along(cli: Cli, tmp_path: Path) -> None:
    batch = small_batch(
        [5, 9],
        hidden=torch.randn(2, 12, 3).bfloat16(),
        routed=torch.randint(0, 9, (2, 12, 2, 2)).to(torch.int16),
        per_row=torch.randn(2, 4),
    )
    save(tmp_path / "b.safetensors", batch)
    assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p").status == 0
    (pack,) = read_packs(tmp_path / "p", 1)[0]
    for name in ("hidden", "routed"):
        want = torch.cat([batch[name][0, :5], batch[name][1, :9]])
        assert torch.equal(pack[name][0], want)
    assert torch.equal(pack["per_row"], batch["per_row"])


def test_a_square_row_aligned_tensor_is_told_apart_by_its_option(cli: Cli, tmp_path: Path) -> None:
    square = torch.arange(24.0).reshape(2, 12)
    save(tmp_path / "b.safetensors", small_batch([5, 9], pairwise=square))
    argv = ["--row-aligned", "pairwise"]
    assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p", *argv).status == 0
    assert torch.equal(read_packs(tmp_path / "p", 1)[0][0]["pairwise"], square)


@pytest.mark.parametrize(("tail", "padded"), [("absorb", [6, 10]), ("segment", [6, 9, 1])])
def test_the_tail_is_absorbed_or_becomes_a_segment(
    cli: Cli, tmp_path: Path, tail: str, padded: list[int]
) -> None:
    save(tmp_path / "b.safetensors", small_batch([5, 9]))
    argv = ["--fp8", "tensorwise", "--tail", tail, "--pad-multiple", 3]
    assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p", *argv).status == 0
    (pack,) = read_packs(tmp_path / "p", 1)[0]
    assert np.diff(pack["cu_seqlens_padded"]).tolist() == padded
    assert np.diff(pack["cu_seqlens"]).tolist() == [5, 9, 0][: len(padded)]
    assert pack["sequence_index"].tolist() == [0, 1]
    assert pack["position_ids"][0].tolist() == [i for n in padded for i in range(n)]


@pytest.mark.parametrize(
    ("options", "total"),
    [
        (["--fp8", "tensorwise"], 16),
        (["--fp8", "mxfp8"], 32),
        (["--fp8", "blockwise"], 128),
        (["--fp8", "tensorwise", "--pad-packed-multiple", "24"], 48),
        (["--fp8", "tensorwise", "--cp", "2"], 64),
        (["--fp8", "tensorwise", "--tp", "2", "--sequence-parallel"], 32),
        (["--fp8", "tensorwise", "--tp", "2"], 16),
        (["--pad-packed-multiple", "10"], 20),
        (["--pad-packed-to", "77"], 77),
    ],
)
def test_the_total_is_padded_to_its_multiple(
    cli: Cli, tmp_path: Path, options: list[str], total: int
) -> None:
    save(tmp_path / "b.safetensors", small_batch([5, 9]))
    done = cli(
        "pack", tmp_path / "b.safetensors", "-o", tmp_path / "p", *options, "--format", "json"
    )
    assert done.status == 0, done.err
    assert json.loads(done.out)["stats"]["packed_slots"] == total


def test_several_files_count_their_rows_on(cli: Cli, tmp_path: Path) -> None:
    one, two = small_batch([5, 9]), small_batch([12], 12)
    save(tmp_path / "1.safetensors", one)
    save(tmp_path / "2.safetensors", two)
    argv = [tmp_path / "1.safetensors", tmp_path / "2.safetensors", "-o", tmp_path / "p"]
    assert cli("pack", *argv).status == 0
    (pack,) = read_packs(tmp_path / "p", 1)[0]
    assert pack["sequence_index"].tolist() == [0, 1, 2]
    want = [*range(1, 6), *range(101, 110), *range(1, 13)]
    assert pack["input_ids"][0].tolist() == want


def test_renamed_tensors_are_packed_under_their_canonical_names(cli: Cli, tmp_path: Path) -> None:
    batch = small_batch([5, 9])
    batch["tokens"] = batch.pop("input_ids")
    save(tmp_path / "b.safetensors", batch)
    refused = cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p")
    assert refused.status == 2
    assert "input_ids" in refused.err
    assert "--rename" in refused.err
    argv = ["--rename", "input_ids=tokens"]
    assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p", *argv).status == 0
    assert "input_ids" in read_packs(tmp_path / "p", 1)[0][0]


def test_lengths_come_from_a_right_padded_attention_mask(cli: Cli, tmp_path: Path) -> None:
    batch = small_batch([5, 9])
    lengths = batch.pop("input_lengths")
    batch["attention_mask"] = (torch.arange(12) < lengths[:, None]).long()
    save(tmp_path / "b.safetensors", batch)
    assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p").status == 0
    assert read_packs(tmp_path / "p", 1)[0][0]["cu_seqlens"].tolist() == [0, 5, 14]


def test_empty_rows_are_left_out_when_asked(cli: Cli, tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", small_batch([5, 0, 9]))
    argv = [tmp_path / "b.safetensors", "-o", tmp_path / "p"]
    refused = cli("pack", *argv)
    assert refused.status == 2
    assert "row 1 of length 0" in refused.err
    assert cli("pack", *argv, "--drop-empty").status == 0
    assert read_packs(tmp_path / "p", 1)[0][0]["sequence_index"].tolist() == [0, 2]
    argv = [tmp_path / "p", "-o", tmp_path / "u.safetensors"]
    assert cli("unpack", *argv).status == 0
    assert load_file(tmp_path / "u.safetensors")["input_ids"][1].tolist() == [0] * 12


def test_weights_other_than_zero_and_one_are_packed(cli: Cli, tmp_path: Path) -> None:
    batch = small_batch([4])
    batch["token_mask"][0, :4] = torch.tensor([0.0, 0.25, 2.0, 0.5])
    batch["sample_mask"] = torch.tensor([0.5])
    save(tmp_path / "b.safetensors", batch)
    assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p").status == 0
    (pack,) = read_packs(tmp_path / "p", 1)[0]
    assert pack["draft_token_mask"].tolist() == [[0.125, 1.0, 0.25, 0.0]]


@pytest.mark.parametrize("algorithm", ["concat", "ffd", "ffs", "mffd", "bfd"])
def test_every_algorithm_holds_every_row_once_and_no_bin_overflows(
    cli: Cli, tmp_path: Path, fixtures: Path, algorithm: str
) -> None:
    argv = ["--max-tokens", 200, "--algorithm", algorithm, "--cp", 2, "--fp8", "tensorwise"]
    argv += ["--bins-multiple-of", 4, "--min-bins", 9]
    done = cli("pack", fixtures / "batch.safetensors", "-o", tmp_path / "p", *argv)
    assert done.status == 0, done.err
    packs = read_packs(tmp_path / "p", 2)
    assert len(packs) == 12
    rows = [row for shards in packs for row in shards[0]["sequence_index"].tolist()]
    assert sorted(rows) == list(range(16))
    for shards in packs:
        total = int(shards[0]["cu_seqlens_padded"][-1])
        assert total <= 200
        assert total % 64 == 0
        expect_pack(load_file(fixtures / "batch.safetensors"), shards, 2)
    assert json.loads((tmp_path / "p/manifest.json").read_text())["algorithm"] == algorithm


@pytest.mark.parametrize(
    ("lengths", "options", "says"),
    [
        ([5, 9], ["--cp", 2, "--pad-multiple", 6], "pad multiple 6 is not a multiple of 4"),
        ([5, 9], ["--cp", 2, "--pad-packed-to", 30], "30 is not a multiple of 4"),
        ([5, 9], ["--pad-packed-to", 13], "14 padded slots, more than pad-packed-to 13"),
        ([5, 9], ["--max-tokens", 8], "row 1 has 9 tokens, 9 padded slots"),
        ([5, 9], ["--max-tokens", 20, "--pad-packed-to", 24], "more than --max-tokens 20"),
        ([5, 9], ["--max-tokens", 20, "--min-bins", 3], "1 sequence"),
        ([5, 9], ["--min-bins", 2], "--max-tokens"),
        ([5, 9], ["--max-tokens", 3, "--cp", 2], "less than 4"),
        ([0, 0], ["--drop-empty"], "nothing to pack"),
        ([5, 9], ["--rename", "input_ids"], "CANONICAL=THEIRS"),
        ([5, 9], ["--rename", "a=input_ids", "--rename", "a=token_mask"], "twice"),
        ([5, 9], ["--device", "tpu"], "auto, cpu, cuda"),
        ([5, 9], ["--max-memory", "lots"], "512MiB"),
        ([5, 9], ["--report", "r.docx"], ".json"),
        ([5, 9], ["--cp", 0], "--cp"),
        ([5, 9], ["--algorithm", "best"], "bfd"),
        ([13, 9], [], "input_lengths[0] is 13, past the row width 12"),
        ([-1, 9], [], "input_lengths[0]"),
    ],
)
def test_a_request_that_cannot_be_met_is_exit_2_and_leaves_nothing(
    cli: Cli, tmp_path: Path, lengths: list[int], options: list[object], says: str
) -> None:
    save(tmp_path / "b.safetensors", small_batch(lengths))
    done = cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p", *options)
    assert done.status == 2
    assert says in done.err
    assert len(done.err.strip().splitlines()) <= 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.safetensors"]


def change(name: str, value: torch.Tensor | None) -> Callable[[dict[str, Any]], None]:
    def mend(batch: dict[str, Any]) -> None:
        if value is None:
            del batch[name]
        else:
            batch[name] = value

    return mend


@pytest.mark.parametrize(
    ("mend", "says"),
    [
        (change("token_mask", torch.full((2, 12), torch.nan)), "not finite in row 0"),
        (change("sample_mask", torch.tensor([1.0, torch.inf])), "sample_mask"),
        (change("sample_mask", torch.ones(3)), "sample_mask"),
        (change("token_mask", torch.ones(2, 11)), "token_mask"),
        (change("input_lengths", torch.tensor([5.0, 9.0])), "input_lengths"),
        (change("input_lengths", torch.tensor([5, 9, 2])), "input_lengths"),
        (change("attention_mask", torch.ones(2, 12)), "row 0"),
        (change("input_ids", torch.arange(12)), "input_ids"),
        (change("input_ids", None), "input_ids"),
        (change("stray", torch.ones(7)), "stray"),
        (change("input_ids", torch.zeros(0, 12, dtype=torch.int64)), ""),
    ],
)
def test_a_batch_that_is_none_is_exit_2_and_leaves_nothing(
    cli: Cli, tmp_path: Path, mend: Callable[[dict[str, Any]], None], says: str
) -> None:
    batch = small_batch([5, 9])
    mend(batch)
    save(tmp_path / "b.safetensors", batch)
    done = cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p")
    assert done.status == 2, done.out
    assert says in done.err
    assert len(done.err.strip().splitlines()) <= 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.safetensors"]


def test_an_existing_output_is_kept_without_force(cli: Cli, tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", small_batch([5, 9]))
    argv = ["pack", tmp_path / "b.safetensors", "-o", tmp_path / "p"]
    assert cli(*argv).status == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "p").iterdir()}
    refused = cli(*argv, "--cp", 2)
    assert refused.status == 2
    assert "--force" in refused.err
    assert {p.name: p.read_bytes() for p in (tmp_path / "p").iterdir()} == before
    assert cli(*argv, "--cp", 2, "--force").status == 0
    assert len(list((tmp_path / "p").glob("*.cp?of2.safetensors"))) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.safetensors", "p"]


def test_the_same_input_gives_the_same_bytes_under_the_umask(cli: Cli, tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", small_batch([5, 9, 12]))
    old = os.umask(0o027)
    try:
        for out in ("p", "q"):
            argv = ["--cp", 2, "--max-tokens", 16]
            assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / out, *argv).status == 0
    finally:
        os.umask(old)
    files = sorted(p.name for p in (tmp_path / "p").iterdir())
    assert len(files) == 7
    for name in files:
        assert (tmp_path / "p" / name).read_bytes() == (tmp_path / "q" / name).read_bytes()
        assert stat.S_IMODE((tmp_path / "p" / name).stat().st_mode) == 0o640
    manifest = (tmp_path / "p" / "manifest.json").read_text()
    assert str(tmp_path) not in manifest


def test_unpack_refuses_a_pack_that_is_not_the_manifest_s(cli: Cli, tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", small_batch([5, 9]))
    assert cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p").status == 0
    path = tmp_path / "p" / "pack-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused = cli("unpack", tmp_path / "p", "-o", tmp_path / "u.safetensors")
    assert refused.status == 2
    assert "pack-00000.safetensors" in refused.err
    assert not (tmp_path / "u.safetensors").exists()
    assert cli("unpack", tmp_path, "-o", tmp_path / "u.safetensors").status == 2


def test_the_report_counts_tokens_padding_and_tail(cli: Cli, tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", small_batch([5, 9, 2]))
    argv = ["--cp", 2, "--max-tokens", 20, "--pad-packed-to", 20, "--format", "json"]
    done = cli("pack", tmp_path / "b.safetensors", "-o", tmp_path / "p", *argv)
    stats = json.loads(done.out)["stats"]
    # Padded to 8, 12 and 4: bins {8, 12} and {4}, each brought to 20.
    assert stats == {
        "real_tokens": 16,
        "alignment_padding": 8,
        "tail_padding": 16,
        "packed_slots": 40,
        "utilisation": 0.4,
        "microbatches": 2,
        "lower_bound": 2,
        "balance": 14 / 8,
        "bins": [{"real_tokens": 14, "slots": 20}, {"real_tokens": 2, "slots": 20}],
    }


def test_a_mask_that_is_not_finite_names_its_own_file_and_row(cli: Cli, tmp_path: Path) -> None:
    save(tmp_path / "1.safetensors", small_batch([5, 9]))
    bad = small_batch([5, 9])
    bad["token_mask"][1, 3] = torch.inf
    save(tmp_path / "2.safetensors", bad)
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    done = cli("pack", *paths, "-o", tmp_path / "p")
    assert done.status == 2
    assert "2.safetensors: token_mask has a value that is not finite in row 1" in done.err
