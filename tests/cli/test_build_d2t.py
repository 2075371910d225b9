"""``opdtool build-d2t``: what is counted, what is chosen, what is written, what is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli
from tests.reference import vocab as slow


def random_batch(seed: int, rows: int = 7, width: int = 30, vocab: int = 50) -> dict[str, Any]:
    """Uneven rows with masks of several weights, one row dropped, one empty."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=rng)
    lengths[0], lengths[1] = width, 0
    sample = torch.ones(rows)
    sample[2] = 0.0
    ids = (torch.rand(rows, width, generator=rng) ** 3 * vocab).long()
    mask = torch.randint(0, 3, (rows, width), generator=rng).float() / 2
    return {"input_ids": ids, "input_lengths": lengths, "token_mask": mask, "sample_mask": sample}


def counted_tokens(batch: dict[str, Any], everything: bool = False) -> list[int]:
    """Every token that counts, one at a time."""
    found = []
    for b, length in enumerate(batch["input_lengths"].tolist()):
        for s in range(length):
            weight = float(batch["token_mask"][b, s]) * float(batch["sample_mask"][b])
            if everything or weight != 0:
                found.append(int(batch["input_ids"][b, s]))
    return found


def targets_of(path: Path) -> list[int]:
    d2t = load_file(path)["d2t"]
    assert d2t.dtype == torch.int64
    return [i + offset for i, offset in enumerate(d2t.tolist())]


def test_the_fixtures_map_is_reproduced_from_the_fixture_batch(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d2t.safetensors"
    argv = ["--draft-vocab-size", 32, "--vocab-size", 320, "-o", out]
    assert cli("build-d2t", fixtures / "batch.safetensors", *argv).status == 0
    shipped, built = load_file(fixtures / "draft" / "model.safetensors"), load_file(out)
    assert set(built) == {"d2t", "t2d"}
    for name in built:
        assert torch.equal(built[name], shipped[name])
        assert built[name].dtype == shipped[name].dtype
    assert int(built["t2d"].sum()) == 32


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("memory", ["1GiB", "100"])
def test_many_files_are_counted_as_one_by_masks_and_lengths(
    cli: Cli, tmp_path: Path, everything: bool, memory: str
) -> None:
    batches = [random_batch(seed, width=20 + seed) for seed in range(3)]
    files = []
    for i, batch in enumerate(batches):
        files.append(tmp_path / f"{i}.safetensors")
        save_file(batch, files[-1])
    tokens = [t for batch in batches for t in counted_tokens(batch, everything)]
    assert 0 < len(tokens) < sum(batch["input_ids"].numel() for batch in batches)
    out = tmp_path / "out.safetensors"
    argv = ["--count", "all"] if everything else []
    argv += ["--draft-vocab-size", "12", "--vocab-size", "50", "--max-memory", memory]
    done = cli("build-d2t", *files, "-o", out, "--format", "json", *argv)
    assert done.status == 0, done.err
    assert targets_of(out) == slow.most_frequent(tokens, 50, 12)
    stats = json.loads(done.out)["stats"]
    kept = sum(token in targets_of(out) for token in tokens)
    assert stats["counted_tokens"] == len(tokens)
    assert stats["coverage"] == pytest.approx(kept / len(tokens))
    with safe_open(out, "pt") as file:
        assert float(file.metadata()["coverage"]) == stats["coverage"]


def test_the_same_input_gives_the_same_bytes_with_the_umasks_permissions(
    cli: Cli, fixtures: Path, tmp_path: Path
) -> None:
    argv = ["--draft-vocab-size", 32, "--vocab-size", 320]
    for name in ("a", "b"):
        cli("build-d2t", fixtures / "batch.safetensors", *argv, "-o", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
    again = cli("build-d2t", fixtures / "batch.safetensors", *argv, "-o", tmp_path / "a")
    assert again.status == 2
    assert "--force" in again.err


@pytest.mark.parametrize("kind", ["npy", "safetensors", "float npy"])
def test_a_counts_vector_is_as_good_as_batches_and_tells_the_vocabulary_size(
    cli: Cli, tmp_path: Path, kind: str
) -> None:
    counts = np.array([0, 5, 0, 9, 5, 5, 0, 1])
    source = tmp_path / ("c.npy" if "npy" in kind else "c.safetensors")
    if kind == "safetensors":
        save_file({"counts": torch.from_numpy(counts)}, source)
    else:
        np.save(source, counts.astype(np.float32) if "float" in kind else counts)
    out = tmp_path / "out.safetensors"
    argv = ["--draft-vocab-size", 4, "--must-include", "6,7", "-o", out]
    assert cli("build-d2t", source, *argv).status == 0
    assert targets_of(out) == [1, 3, 6, 7]
    assert cli("build-d2t", source, source, *argv, "--force").status == 0
    assert targets_of(out) == [1, 3, 6, 7]
    assert cli("build-d2t", source, *argv, "--vocab-size", 9, "--force").status == 2


def test_never_fewer_than_d_entries_and_never_more_than_there_are_ids(
    cli: Cli, tmp_path: Path
) -> None:
    np.save(tmp_path / "c.npy", np.array([0, 0, 3, 0, 0]))
    out = tmp_path / "out.safetensors"
    assert cli("build-d2t", tmp_path / "c.npy", "--draft-vocab-size", 4, "-o", out).status == 0
    assert targets_of(out) == [0, 1, 2, 3]
    refused = cli("build-d2t", tmp_path / "c.npy", "--draft-vocab-size", 6, "-o", out, "--force")
    assert refused.status == 2
    assert "draft vocabulary of 6 ids cannot be taken from 5" in refused.err
    assert targets_of(out) == [0, 1, 2, 3]


def test_ids_outside_the_vocabulary_are_warned_of_and_not_counted(cli: Cli, tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 50, 2], [3, -100, 2, 60]])
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0]])  # the 60 is not trained on
    save_file({"input_ids": ids, "token_mask": mask}, tmp_path / "b.safetensors")
    out = tmp_path / "out.safetensors"
    argv = ["--draft-vocab-size", 2, "--vocab-size", 10, "-o", out, "--format", "json"]
    done = cli("build-d2t", tmp_path / "b.safetensors", *argv)
    report = json.loads(done.out)
    assert done.status == 0
    assert report["summary"]["warned"] == 1
    check = report["checks"][0]
    assert (check["code"], check["status"], check["mismatches"]) == ("OPD417", "warn", 2)
    assert check["first"] == [
        {"file": "b.safetensors", "sequence": 0, "position": 2, "actual": 50},
        {"file": "b.safetensors", "sequence": 1, "position": 1, "actual": -100},
    ]
    assert report["stats"]["counted_tokens"] == 5
    assert targets_of(out) == [1, 2]


def test_a_sweep_shows_the_coverage_of_every_size_and_writes_nothing(
    cli: Cli, tmp_path: Path
) -> None:
    np.save(tmp_path / "c.npy", np.array([50, 30, 15, 5, 0]))
    done = cli("build-d2t", tmp_path / "c.npy", "--sweep", "1,2,3")
    assert done.status == 0
    for share in ("50.0000%", "80.0000%", "95.0000%", "5.0000%"):
        assert share in done.out
    assert done.out.count("█") > 80
    as_json = cli("build-d2t", tmp_path / "c.npy", "--sweep", "1,2", "--format", "json")
    assert json.loads(as_json.out)["stats"]["sweep"] == [
        {"draft_vocab_size": 1, "coverage": 0.5},
        {"draft_vocab_size": 2, "coverage": 0.8},
    ]
    assert os.listdir(tmp_path) == ["c.npy"]


def test_a_batch_may_use_its_own_names(cli: Cli, tmp_path: Path) -> None:
    save_file(
        {"ids": torch.tensor([[4, 4, 5]]), "loss_mask": torch.tensor([[1.0, 1, 0]])},
        tmp_path / "b.safetensors",
    )
    out = tmp_path / "out.safetensors"
    argv = ["--draft-vocab-size", 1, "--vocab-size", 6, "-o", out]
    argv += ["--rename", "input_ids=ids", "--rename", "token_mask=loss_mask"]
    assert cli("build-d2t", tmp_path / "b.safetensors", *argv).status == 0
    assert targets_of(out) == [4]


BATCH = {"input_ids": torch.tensor([[1, 2]]), "token_mask": torch.ones(1, 2)}
OUT = ["-o", "out.safetensors", "--draft-vocab-size", "1", "--vocab-size", "9"]


@pytest.mark.parametrize(
    ("tensors", "argv", "said"),
    [
        ({"input_ids": torch.tensor([[1, 2]])}, OUT, "no token_mask says which tokens"),
        (BATCH, OUT[:4], "give --vocab-size"),
        (BATCH, ["--vocab-size", "9"], "give --draft-vocab-size D, or --sweep"),
        (BATCH, OUT[2:], "give -o FILE"),
        (BATCH, ["-o", "out.npy", *OUT[2:]], "npy is another format"),
        (BATCH, [*OUT, "--must-include", "9"], "required id 9 is outside the vocabulary 0..8"),
        (BATCH, [*OUT, "--must-include", "1,2"], "2 ids are required"),
        (BATCH, [*OUT, "--must-include", "1,x"], "'x' is no id"),
        (BATCH, [*OUT, "--sweep", "10"], "cannot be taken from 9"),
        (BATCH | {"token_mask": torch.zeros(1, 2)}, OUT, "no token was counted"),
        (BATCH | {"input_ids": torch.zeros(1, 2)}, OUT, "input_ids is F32"),
        (BATCH | {"token_mask": torch.tensor([[1.0, float("nan")]])}, OUT, "token_mask"),
        ({"x": torch.zeros(3)}, OUT, "input_ids"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, torch.Tensor],
    argv: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(tensors, "b.safetensors")
    done = cli("build-d2t", "b.safetensors", *argv)
    assert done.status == 2
    assert said in done.err
    assert os.listdir(tmp_path) == ["b.safetensors"]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (np.ones((2, 2)), "a counts vector [V] was expected"),
        (np.array([1, -1]), "count -1 of id 1"),
        (np.array([1.0, np.inf]), "not finite"),
        (np.zeros(3), "no token was counted"),
    ],
)
def test_counts_that_are_none_are_refused(
    cli: Cli, tmp_path: Path, counts: np.ndarray[Any, Any], said: str
) -> None:
    np.save(tmp_path / "c.npy", counts)
    done = cli("build-d2t", tmp_path / "c.npy", "--sweep", "1")
    assert done.status == 2
    assert said in done.err


def built(cli: Cli, source: Path, out: Path, *argv: object) -> dict[str, Any]:
    """The stats of a build of two ids."""
    words = [source, "--draft-vocab-size", 2, "-o", out, "--force", "--format", "json", *argv]
    done = cli("build-d2t", *words)
    assert done.status == 0, done.err
    stats: dict[str, Any] = json.loads(done.out)["stats"]
    return stats


def test_counts_that_add_up_past_int64_are_added_exactly(cli: Cli, tmp_path: Path) -> None:
    counts = [2**62, 2**62, 2**62, 1]
    assert sum(counts) > 2**63
    np.save(tmp_path / "c.npy", np.array(counts))
    stats = built(cli, tmp_path / "c.npy", tmp_path / "o.safetensors")
    assert stats["counted_tokens"] == sum(counts)
    assert stats["coverage"] == 2**63 / sum(counts)
    np.save(tmp_path / "m.npy", np.array([0, 0]))
    words = ["verify-d2t", tmp_path / "m.npy", "--counts", tmp_path / "c.npy", "--format", "json"]
    told = json.loads(cli(*words).out)["stats"]
    assert told["coverage"] == told["best_coverage"] == 2**63 / sum(counts)


def test_large_counts_of_any_dtype_are_taken_or_refused_with_the_reason(
    cli: Cli, tmp_path: Path
) -> None:
    path, out = tmp_path / "c.npy", tmp_path / "o.safetensors"
    np.save(path, np.array([5, 2**63 - 1, 7], dtype=np.uint64))
    assert built(cli, path, out)["counted_tokens"] == 2**63 + 11
    np.save(path, np.array([1e19, 1e19, 3e19]))
    assert built(cli, path, out)["coverage"] == 0.8
    assert targets_of(out) == [0, 2]
    for counts, said in (
        (np.array([1, 2**63 + 5], dtype=np.uint64), "count 9223372036854775813 of id 1 is past"),
        (np.array([1e308, 1e308]), "add up past what a float can hold"),
        (np.array([True, False]), "bool; numbers were expected"),
    ):
        np.save(path, counts)
        done = cli("build-d2t", path, "--sweep", 1)
        assert (done.status, done.out) == (2, "")
        assert f"{path}: " in done.err
        assert said in done.err


def test_counts_of_several_files_that_pass_int64_together_are_refused(
    cli: Cli, tmp_path: Path
) -> None:
    np.save(tmp_path / "c.npy", np.array([1, 2**62]))
    assert cli("build-d2t", tmp_path / "c.npy", "--sweep", 1).status == 0
    done = cli("build-d2t", tmp_path / "c.npy", tmp_path / "c.npy", "--sweep", 1)
    assert done.status == 2
    assert "id 1 is counted more than 9223372036854775807 times" in done.err


COUNTS = torch.tensor([0, 5, 0, 9, 5])


@pytest.mark.parametrize(
    ("tensors", "argv"),
    [
        ({"counts": COUNTS}, []),
        ({"token_counts": COUNTS}, []),
        ({"token_freq": COUNTS.float()}, []),
        ({"zz": COUNTS}, []),
        ({"zz": COUNTS.to(torch.uint16)}, []),
        ({"zz": COUNTS}, ["--rename", "counts=zz"]),
        ({"zz": COUNTS.double(), "total": torch.tensor([19])}, ["--rename", "counts=zz"]),
        ({"zz": COUNTS, "yy": COUNTS.flip(0)}, ["--rename", "counts=zz"]),
        (
            {"zz": COUNTS, "counts": COUNTS[:2].clone()},
            ["--rename", "counts=zz", "--rename", "x=counts"],
        ),
    ],
)
def test_counts_are_found_by_name_by_rename_or_as_the_only_tensor(
    cli: Cli, tmp_path: Path, tensors: dict[str, torch.Tensor], argv: list[str]
) -> None:
    save_file(tensors, tmp_path / "c.safetensors")
    out = tmp_path / "o.safetensors"
    assert built(cli, tmp_path / "c.safetensors", out, *argv)["counted_tokens"] == 19
    assert targets_of(out) == [1, 3]


def test_renamed_counts_and_renamed_batches_are_added_up(cli: Cli, tmp_path: Path) -> None:
    save_file({"zz": COUNTS}, tmp_path / "c.safetensors")
    ids = {"ids": torch.tensor([[4, 4, 0]]), "token_mask": torch.ones(1, 3)}
    save_file(ids, tmp_path / "b.safetensors")
    renames = ["--rename", "counts=zz", "--rename", "input_ids=ids", "--vocab-size", 5]
    files = [tmp_path / "b.safetensors", tmp_path / "c.safetensors"]
    assert built(cli, files[0], tmp_path / "o", files[1], *renames)["counted_tokens"] == 22
    assert targets_of(tmp_path / "o") == [3, 4]


@pytest.mark.parametrize(
    ("tensors", "argv", "said"),
    [
        ({"zz": COUNTS, "yy": COUNTS.clone()}, [], "input_ids"),  # which of the two?
        ({"d2t": COUNTS}, [], "input_ids"),
        ({"draft.d2t": COUNTS}, [], "input_ids"),
        ({"zz": COUNTS.float()}, [], "input_ids"),
        ({"zz": COUNTS}, ["--rename", "counts=xx"], "--rename counts=xx: no input has"),
        ({"zz": COUNTS}, ["--rename", "input_ids=xx"], "--rename input_ids=xx: no input has"),
        ({"zz": COUNTS[None]}, ["--rename", "counts=zz"], "zz has shape [1, 5]; a counts vector"),
    ],
)
def test_counts_that_cannot_be_told_are_refused(
    cli: Cli,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    argv: list[str],
    said: str,
) -> None:
    save_file(tensors, tmp_path / "c.safetensors")
    done = cli("build-d2t", tmp_path / "c.safetensors", "--vocab-size", 5, "--sweep", 1, *argv)
    assert done.status == 2
    assert said in done.err


def test_an_output_of_a_sweep_alone_is_refused_for_the_true_reason(
    cli: Cli, tmp_path: Path
) -> None:
    np.save(tmp_path / "c.npy", np.array([1, 2]))
    done = cli("build-d2t", tmp_path / "c.npy", "--sweep", "1,2", "-o", tmp_path / "o")
    assert done.status == 2
    assert "needs --draft-vocab-size D" in done.err
    assert "or --sweep" not in done.err
    assert os.listdir(tmp_path) == ["c.npy"]


def test_where_nothing_was_counted_the_advice_can_help(cli: Cli, tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", np.zeros(3, dtype=np.int64))
    np.save(tmp_path / "m.npy", np.array([0, 1]))
    ids = {"input_ids": torch.tensor([[7, 8]])}
    save_file(ids | {"token_mask": torch.zeros(1, 2)}, tmp_path / "masked.safetensors")
    save_file(ids | {"token_mask": torch.ones(1, 2)}, tmp_path / "outside.safetensors")
    empty = ids | {"token_mask": torch.ones(1, 2), "input_lengths": torch.tensor([0])}
    save_file(empty, tmp_path / "empty.safetensors")
    for name, argv, said in (
        ("c.npy", [], "every count is 0"),
        ("masked.safetensors", [], "--count all counts every real token"),
        ("outside.safetensors", [], "all 2 counted ids lie outside 0..2"),
        ("outside.safetensors", ["--count", "all"], "all 2 counted ids lie outside 0..2"),
        ("empty.safetensors", ["--count", "all"], "all rows are empty"),
        ("empty.safetensors", [], "all rows are empty"),
    ):
        source = tmp_path / name
        for done in (
            cli("build-d2t", source, "--vocab-size", 3, "--sweep", 1, *argv),
            cli("verify-d2t", tmp_path / "m.npy", "--counts", source, "--vocab-size", 3, *argv),
        ):
            assert done.status == 2
            assert str(source) in done.err
            assert "no token was counted" in done.err
            assert said in done.err
            assert ("--count all" in done.err) == (name == "masked.safetensors")


def test_a_device_that_is_not_there_is_refused(cli: Cli, fixtures: Path, tmp_path: Path) -> None:
    argv = ["--draft-vocab-size", 32, "--vocab-size", 320, "-o", tmp_path / "d.safetensors"]
    assert cli("build-d2t", fixtures / "batch.safetensors", *argv, "--device", "cpu").status == 0
    done = cli("build-d2t", fixtures / "batch.safetensors", *argv, "--force", "--device", "tpu")
    assert done.status == 2
    assert "auto, cpu, cuda" in done.err
