"""``opdtool simulate`` passes on a right core, and names the property that a wrong one breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from opdtool.core import exchange, masks, metrics, packing, teacher, vocab
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Pieces
from tests.cli.conftest import Cli

ALL = [f"OPD{code}" for code in range(701, 715)]


def report(cli: Cli, *argv: object, status: int | None = None) -> dict[str, Any]:
    """The JSON report of one ``opdtool simulate``."""
    outcome = cli("simulate", "--format", "json", *argv)
    found: dict[str, Any] = json.loads(outcome.out)
    assert outcome.status == (0 if found["passed"] else 1)
    assert status in (None, outcome.status), outcome.err
    return found


def failed(found: dict[str, Any]) -> set[str]:
    """The codes of the checks that failed."""
    return {check["code"] for check in found["checks"] if check["status"] == "fail"}


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (1, 2), (2, 1), (3, 2), (4, 4)])
def test_the_suite_passes_on_generated_batches(cli: Cli, tp: int, cp: int) -> None:
    found = report(cli, "--tp", tp, "--cp", cp, "--cases", 4, status=0)
    assert [check["code"] for check in found["checks"]] == ALL
    for check in found["checks"]:
        if check["code"] == "OPD714":
            assert check["status"] == "skip"
            assert "--ranks spawn" in check["message"]
        else:
            assert check["status"] == "pass"
            assert check["total"] > 0
    assert found["geometry"]["cases"] == 4


def test_the_suite_passes_on_the_fixtures_at_tp_4_and_cp_4(cli: Cli, fixtures: Path) -> None:
    lengths = load_file(fixtures / "batch.safetensors")["input_lengths"]
    assert len(lengths) == 16
    for name in ("batch.safetensors", "teacher_hidden.safetensors"):
        found = report(cli, fixtures / name, "--tp", 4, "--cp", 4, status=0)
        assert found["geometry"]["sequences"] == 16
        assert found["geometry"]["tokens"] == int(lengths.sum())
        assert found["summary"] == {"passed": 13, "failed": 0, "warned": 0, "skipped": 1}


def test_spawned_ranks_give_the_simulated_ranks_bits(cli: Cli, fixtures: Path) -> None:
    found = report(
        cli, fixtures / "teacher_hidden.safetensors", "--tp", 2, "--cp", 2, "--ranks", "spawn",
        status=0,
    )  # fmt: skip
    last = found["checks"][-1]
    assert (last["code"], last["status"]) == ("OPD714", "pass")
    # Four ranks; three geometries of eleven tensors, and five that no padding has a part in.
    assert last["total"] == 4 * (3 * 11 + 5)


def test_the_same_seed_gives_the_same_report_and_another_seed_another(cli: Cli) -> None:
    def tokens(seed: int) -> Any:
        return report(cli, "--seed", seed, "--cases", 3)["geometry"]["tokens"]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_there_is_a_table_for_every_geometry(cli: Cli) -> None:
    outcome = cli("simulate", "--tp", 2, "--cp", 2, "--cases", 1)
    assert outcome.status == 0
    assert "TP 2, CP 2, sequences to 4, total to 4 (absorb)" in outcome.out
    assert "TP 2, CP 2, sequence-parallel, sequences to 8, total to 128 (absorb)" in outcome.out
    assert "TP 2, CP 2, sequences to 12, total to 20 (segment)" in outcome.out


def test_a_batch_without_tokens_is_refused(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    lengths = torch.zeros(2, dtype=torch.int64)
    save_file({"input_ids": torch.ones(2, 4, dtype=torch.int64), "input_lengths": lengths}, path)
    outcome = cli("simulate", path)
    assert outcome.status == 2
    assert "no rows with tokens" in outcome.err


def test_a_payload_that_is_not_finite_is_refused_instead_of_judged(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    batch = load_file(fixtures / "teacher_hidden.safetensors")
    batch["teacher_full_hidden_states"][2, 3, 4] = float("nan")
    save_file(batch, tmp_path / "bad.safetensors")
    outcome = cli("simulate", tmp_path / "bad.safetensors")
    assert outcome.status == 2
    assert "teacher_full_hidden_states has values that are not finite in rows 0 to" in outcome.err


def windows_from(
    window: Callable[[int, int, int], Sequence[int]],
) -> Callable[..., Pieces]:
    """``PackedLayout.pieces`` that cuts other windows: ``window(length, rank, size)``."""

    def pieces(
        self: PackedLayout, cp_rank: int = 0, *, shift: int = 0, limit: int | None = None
    ) -> Pieces:
        runs = []
        local = 0
        for b, padded in enumerate(self.padded_lengths.tolist()):
            length = int(self.lengths[b]) if limit is None else min(int(self.lengths[b]), limit)
            for p in window(padded, cp_rank, self.cp_size):
                source = (p - shift) % padded
                if source < length:
                    runs.append((local, b, source, 1))
                local += 1
        columns = np.array(runs, dtype=np.int64).reshape(-1, 4).T.copy()
        return Pieces(dst=columns[0], segment=columns[1], position=columns[2], count=columns[3])

    return pieces


def contiguous(length: int, rank: int, size: int) -> list[int]:
    """The r-th of ``size`` equal pieces."""
    return list(range(rank * length // size, (rank + 1) * length // size))


def late_chunk_first(length: int, rank: int, size: int) -> list[int]:
    """The right two chunks, in the wrong order."""
    if size == 1:
        return list(range(length))
    chunk = length // (2 * size)
    last = 2 * size - 1 - rank
    return [*range(last * chunk, (last + 1) * chunk), *range(rank * chunk, (rank + 1) * chunk)]


def first_chunk_twice(length: int, rank: int, size: int) -> list[int]:
    """Rank r's early chunk, and no late one."""
    if size == 1:
        return list(range(length))
    return 2 * list(range(rank * length // (2 * size), (rank + 1) * length // (2 * size)))


def _roll_right(tensor: Tensor, cu_seqlens_padded: Any, seq_dim: int) -> Tensor:
    out = tensor.roll(1, seq_dim)
    out[:, torch.tensor(cu_seqlens_padded[1:]) - 1] = 0
    return out


def _roll_keeps_ends(tensor: Tensor, cu_seqlens_padded: Any, seq_dim: int) -> Tensor:
    return tensor.roll(-1, seq_dim)


def _columns_reversed(local: Tensor, plan: Any, group: Any) -> Tensor:
    return exchange.exchange_columns(local, plan, group).flip(-1)


def _own_gradient_alone(wanted: Tensor, plan: Any, group: Any) -> Tensor:
    right = RETURN(wanted, plan, group)
    return right if group.rank == 0 else torch.zeros_like(right)


def _first_head_for_all(
    payload: Tensor, heads: Any, index: Tensor, output_dtype: Any = None
) -> Tensor:
    return PROJECT(payload, heads, torch.full_like(index, int(index[0])), output_dtype)


def _right_vocab_window(V: int, V_local: int, rank: int | None) -> slice:
    start = 0 if rank is None else (V - V_local) - rank * V_local
    return slice(start, start + V_local)


def _mask_not_shifted(weights: Tensor, layout: PackedLayout, *, cp_rank: int = 0) -> Tensor:
    return packing.pack(weights, layout, cp_rank=cp_rank)


def _unpacked_backwards(*args: Any, **kwargs: Any) -> Tensor:
    return UNPACK(*args, **kwargs).flip(0)


def _gathered_in_rank_order(shards: Sequence[Tensor], layout: PackedLayout) -> Tensor:
    return torch.cat(list(shards))


def _mean_of_means(values: Any, kinds: Any, **factors: float) -> Any:
    return RESCALE(values, kinds, **dict.fromkeys(factors, 1.0))


def _no_layout(*args: Any) -> None:
    LAYOUT(*args)


def _noisy(payload: Tensor, head: Tensor, output_dtype: Any) -> Tensor:
    return MULTIPLY(payload, head, output_dtype) * 1.02


def _owner_zero(self: PackedLayout, slots: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(slots), slots % self.local_total


RETURN = exchange._return
PROJECT = teacher.project_hidden_states_per_teacher
UNPACK = packing.unpack
RESCALE = metrics.rescale_loss_metrics
LAYOUT = teacher._layout
MULTIPLY = teacher._project

BREAKAGES: dict[str, tuple[Any, str, Any, set[str], set[str]]] = {
    # what is broken: (where, name, by what, the checks that must fail, those that may)
    "windows contiguous": (
        PackedLayout, "pieces", windows_from(contiguous), {"OPD702", "OPD703", "OPD706"}, set(),
    ),
    "windows in the wrong order": (
        PackedLayout, "pieces", windows_from(late_chunk_first), {"OPD702", "OPD703", "OPD706"},
        set(),
    ),
    "windows that overlap": (
        PackedLayout, "pieces", windows_from(first_chunk_twice), {"OPD702", "OPD703", "OPD706"},
        set(),
    ),
    "windows of logits": (
        teacher, "cp_window", lambda n, r, s: (slice(r * n // s, (r + 1) * n // s), slice(0, 0)),
        {"OPD707", "OPD708", "OPD709"}, set(),
    ),
    "roll to the right": (packing, "roll_packed_seq_dim", _roll_right, {"OPD704"}, set()),
    "ends not zeroed": (packing, "roll_packed_seq_dim", _roll_keeps_ends, {"OPD705"}, set()),
    "columns out of order": (vocab, "exchange_columns", _columns_reversed, {"OPD711", "OPD712"},
                             set()),
    "gradients not summed": (exchange, "_return", _own_gradient_alone, {"OPD712"}, set()),
    "one head for all": (
        teacher, "project_hidden_states_per_teacher", _first_head_for_all, {"OPD710"}, set(),
    ),
    "vocabulary windows swapped": (
        teacher, "_vocab_window", _right_vocab_window, {"OPD707"}, set(),
    ),
    "mask not shifted": (masks, "draft_token_mask", _mask_not_shifted, {"OPD706"}, set()),
    "rows unpacked backwards": (packing, "unpack", _unpacked_backwards, {"OPD701"}, set()),
    "shards concatenated": (packing, "gather_cp", _gathered_in_rank_order, {"OPD702"}, set()),
    "wrong owner": (PackedLayout, "owners", _owner_zero, {"OPD703"}, {"OPD702"}),
    "mean of means": (metrics, "rescale_loss_metrics", _mean_of_means, {"OPD713"}, set()),
    "pack cut as one row": (teacher, "_layout", _no_layout, {"OPD709"}, set()),
    "products off by two percent": (
        teacher, "_project", _noisy, {"OPD708", "OPD709", "OPD710"}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKAGES)
def test_a_broken_core_function_fails_its_own_checks(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    where, name, broken, must, may = BREAKAGES[what]
    argv = ("--tp", 2, "--cp", 2, "--cases", 4)
    assert failed(report(cli, *argv)) == set()
    monkeypatch.setattr(where, name, broken)
    found = report(cli, *argv, status=1)
    assert must <= failed(found) <= must | may
    for check in found["checks"]:
        if check["status"] == "fail":
            assert check["mismatches"] > 0
            assert {"case", "geometry", "index", "expected", "actual"} <= set(check["first"][0])


def test_processes_that_compute_something_else_are_told_from_simulated_ranks(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ranks' processes have the right function; only this one has the wrong one.
    monkeypatch.setattr(teacher, "project_hidden_states_per_teacher", _first_head_for_all)
    found = report(cli, "--tp", 2, "--ranks", "spawn", "--cases", 2, status=1)
    assert failed(found) == {"OPD714"}
    assert found["checks"][-1]["first"][0]["tensor"] == "routed"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ranks", ["simulated", "spawn"])
def test_ranks_that_share_a_gpu_agree(cli: Cli, ranks: str) -> None:
    # cuda:0 is everybody's, so the processes meet over gloo.
    report(cli, "--tp", 2, "--ranks", ranks, "--device", "cuda:0", "--cases", 2, status=0)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_ranks_with_a_gpu_each_agree_over_nccl(cli: Cli) -> None:
    found = report(cli, "--tp", 2, "--ranks", "spawn", "--device", "cuda", "--cases", 2, status=0)
    assert found["checks"][-1]["status"] == "pass"
