"""Every command over NaN, infinities, edges of integers, empty and single: a stated outcome."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opdtool.cli.main import run as run_here
from tests.robust.conftest import FIXTURES, save

BATCH = FIXTURES / "batch.safetensors"
HEADS = ["--head", f"0={FIXTURES}/teacher-a", "--head", f"1={FIXTURES}/teacher-b"]
HIDDEN = FIXTURES / "teacher_hidden.safetensors"
LOGITS = FIXTURES / "teacher_logits.safetensors"
NOT_FINITE = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]


class Desk:
    """A folder to work in, and the commands run there in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.err = ""

    def __call__(self, *argv: object) -> int:
        """The exit status; never that of an internal error."""
        self._capsys.readouterr()
        status = run_here([str(word) for word in argv])
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        assert status in (0, 1, 2), self.err
        return status

    def report(self, *argv: object) -> dict[str, Any]:
        """The JSON report of a command that checks."""
        assert self(*argv, "--format", "json") in (0, 1), self.err
        found: dict[str, Any] = json.loads(self.out)
        return found

    def poisoned(self, path: Path, name: str, at: tuple[int, ...], value: float) -> Path:
        """A copy of a file with one value replaced."""
        tensors = load_file(path)
        changed = tensors[name].clone()
        changed[at] = value
        return save(self.folder / "poisoned.safetensors", tensors | {name: changed})

    def save(self, tensors: Mapping[str, torch.Tensor]) -> Path:
        return save(self.folder / "t.safetensors", tensors)

    def pack(self, batch: Path, *geometry: object) -> int:
        return self("pack", batch, "-o", self.folder / "packs", "--force", "-q", *geometry)

    def verify_pack(self, batch: Path, *more: object) -> int:
        return self("verify-pack", self.folder / "packs", "--batch", batch, *more)

    def build_mask(self, batch: Path, *geometry: object) -> int:
        for old in self.folder.glob("mask*"):
            old.unlink()
        return self("build-mask", batch, "-o", self.folder / "mask.safetensors", "-q", *geometry)

    def verify_mask(self, batch: Path, *geometry: object) -> int:
        masks = sorted(self.folder.glob("mask*"))
        return self("verify-mask", *masks, "--batch", batch, *geometry)

    def unpack(self) -> dict[str, torch.Tensor]:
        out = self.folder / "back.safetensors"
        assert self("unpack", self.folder / "packs", "-o", out, "--force", "-q") == 0, self.err
        return load_file(out)

    def everything(self, tensors: Mapping[str, torch.Tensor], *geometry: object) -> None:
        """Packs and masks of a batch are made, held to be right, and unpack to the batch."""
        batch = self.save(tensors)
        assert self.pack(batch, *geometry) == 0, self.err
        assert self.verify_pack(batch) == 0, self.out + self.err
        back = self.unpack()
        assert set(back) == set(tensors)
        lengths = tensors["input_lengths"].to(torch.int64)
        real = torch.arange(tensors["input_ids"].shape[1]) < lengths[:, None]
        for name, value in tensors.items():
            if name == "input_ids" or value.shape[:2] == real.shape:
                assert bits(back[name][real]) == bits(value[real]), name
            else:
                assert bits(back[name]) == bits(value), name
        if "token_mask" in tensors:
            assert self.build_mask(batch, *geometry) == 0, self.err
            assert self.verify_mask(batch, *geometry) == 0, self.out + self.err


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """What makes two tensors the same, NaN included."""
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def small(lengths: list[int], width: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch of these lengths; every real token but the first is trained."""
    rows = len(lengths)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = 10 * torch.arange(rows)[:, None] + torch.arange(width) + 1
    return {
        "input_ids": ids * real,
        "input_lengths": torch.tensor(lengths),
        "token_mask": (real & (torch.arange(width) > 0)).float(),
        "sample_mask": torch.ones(rows),
    } | more


# NaN and infinities


@NOT_FINITE
@pytest.mark.parametrize(
    ("name", "at"), [("token_mask", (8, 20)), ("token_mask", (8, 95)), ("sample_mask", (8,))]
)
def test_weights_that_are_not_finite_are_refused_by_name_and_row(
    desk: Desk, name: str, at: tuple[int, ...], value: float
) -> None:
    assert desk.pack(BATCH) == desk.build_mask(BATCH) == 0
    bad = desk.poisoned(BATCH, name, at, value)
    packs = desk.folder / "packs"
    lines: list[list[object]] = [
        ["pack", bad, "-o", desk.folder / "other"],
        ["build-mask", bad, "-o", desk.folder / "other.safetensors"],
        ["verify-pack", packs, "--batch", bad],
        ["verify-mask", desk.folder / "mask.safetensors", "--batch", bad],
        [
            *["build-d2t", bad, "-o", desk.folder / "other.safetensors"],
            *["--draft-vocab-size", 8, "--vocab-size", 512],
        ],
        ["reconstruct", HIDDEN, *HEADS, "--student", FIXTURES / "student_logits.safetensors"],
    ]
    for line in lines[:-1]:
        assert desk(*line) == 2, line
        assert name in desk.err
        assert "finite" in desk.err
        assert "8" in desk.err
    assert not list(desk.folder.glob("other*"))


@NOT_FINITE
@pytest.mark.parametrize(("name", "at"), [("advantages", (3, 10)), ("total_reward", (3,))])
def test_other_values_are_moved_as_they_are_and_equal_themselves_bit_for_bit(
    desk: Desk, name: str, at: tuple[int, ...], value: float
) -> None:
    batch = desk.poisoned(BATCH, name, at, value)
    desk.everything(load_file(batch), "--cp", 2)
    # A pack of the right values is not one of this batch, nor the other way round.
    assert desk.verify_pack(BATCH) == 1
    assert desk.pack(BATCH) == 0
    assert desk.verify_pack(batch) == 1
    report = desk.report("verify-pack", desk.folder / "packs", "--batch", batch)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert [check["tensor"] for check in failed] == [name]
    if name == "advantages":
        assert failed[0]["mismatches"] == 1
        assert failed[0]["first"][0]["sequence"] == 3
        assert failed[0]["first"][0]["position"] == 10


@NOT_FINITE
def test_a_dump_that_is_not_finite_fails_and_is_located(desk: Desk, value: float) -> None:
    assert desk.build_mask(BATCH) == desk.pack(BATCH) == 0
    bad = desk.poisoned(desk.folder / "mask.safetensors", "draft_token_mask", (0, 30), value)
    report = desk.report("verify-mask", bad, "--batch", BATCH)
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["mask-values"]["status"] == "fail"
    assert by_name["mask-values"]["mismatches"] == 1
    assert by_name["mask-values"]["first"][0]["slot"] == 30
    assert [each for each in report["diagnosis"] if each["match"] == "exact"] == []
    pack = desk.folder / "packs" / "pack-00000.safetensors"
    for name in ("draft_token_mask", "token_mask", "advantages"):
        bad = desk.poisoned(pack, name, (0, 30), value)
        assert desk("verify-pack", bad, "--batch", BATCH) == 1, name


@NOT_FINITE
def test_products_that_are_not_finite_fail_whatever_they_are_compared_with(
    desk: Desk, value: float
) -> None:
    bad = desk.poisoned(HIDDEN, "teacher_full_hidden_states", (2, 5, 7), value)
    for more in ([], ["--reference", LOGITS], ["-o", desk.folder / "rebuilt"]):
        report = desk.report("reconstruct", bad, *HEADS, *more)
        assert not report["passed"]
        finite = next(c for c in report["checks"] if c["name"] == "logits-finite")
        assert finite["status"] == "fail"
    bad = desk.poisoned(LOGITS, "teacher_full_logits", (2, 5, 42), value)
    assert desk("reconstruct", HIDDEN, *HEADS, "--reference", bad) == 1
    # Even when the payload has the same value in the same place.
    assert desk("reconstruct", bad, "--reference", bad) == 1
    shutil.copytree(FIXTURES / "teacher-b", desk.folder / "teacher-b")
    weights = desk.folder / "teacher-b" / "model.safetensors"
    (name,) = [key for key in load_file(weights) if "embed" in key or "lm_head" in key]
    save(weights, load_file(desk.poisoned(weights, name, (17, 3), value)))
    heads = [*HEADS[:3], f"1={desk.folder}/teacher-b"]
    assert desk("reconstruct", HIDDEN, *heads, "--reference", LOGITS) == 1


@NOT_FINITE
def test_recorded_log_probabilities_that_are_not_finite_never_agree(
    desk: Desk, value: float
) -> None:
    recorded = FIXTURES / "logprobs.safetensors"
    right = desk.report("reconstruct", HIDDEN, *HEADS, "--logprobs", recorded)
    assert right["passed"]
    # The token after the first one that is trained, and all of them: where nothing is trained, a
    # whole prompt of one number stands for what nobody recorded.
    batch = load_file(BATCH)
    trained = (batch["token_mask"] * batch["sample_mask"][:, None] > 0)[:, 1:]
    row, column = (batch["token_mask"] > 0).nonzero()[0].tolist()
    assert 1 < int(trained.sum()) < right["stats"]["logprobs"]["tokens"]
    for at, count in (((row, column), 1), ((), int(trained.sum()))):
        bad = desk.poisoned(recorded, "logprobs", at, value)
        report = desk.report("reconstruct", HIDDEN, *HEADS, "--logprobs", bad)
        assert not report["passed"]
        check = next(c for c in report["checks"] if c["name"] == "logprobs-match")
        assert (check["status"], check["mismatches"]) == ("fail", count)


@NOT_FINITE
def test_a_student_that_is_not_finite_fails(desk: Desk, value: float) -> None:
    student = FIXTURES / "student_logits.safetensors"
    (name,) = [key for key in load_file(student) if "logits" in key]
    row, column = (load_file(BATCH)["token_mask"] > 0).nonzero()[0].tolist()
    bad = desk.poisoned(student, name, (row, column - 1, 5), value)
    assert desk("reconstruct", HIDDEN, *HEADS, "--student", student) == 0
    status = desk("reconstruct", HIDDEN, *HEADS, "--student", bad)
    assert status == 1


def test_a_nan_equals_nothing_and_an_infinity_itself(desk: Desk) -> None:
    for value, itself in ((math.nan, 1), (math.inf, 0), (-math.inf, 0)):
        bad = desk.poisoned(LOGITS, "teacher_full_logits", (2, 5, 42), value)
        assert desk("compare", bad, bad) == itself
        assert desk("compare", bad, LOGITS, "--rtol", 1e9, "--atol", 1e9) == 1
        draft = ["--d2t", FIXTURES / "draft"]
        assert desk("map-d2t", bad, *draft, "--reference", bad) == itself
        assert desk("map-d2t", bad, *draft, "--reference", LOGITS, "--atol", 1e9) == 1


@NOT_FINITE
def test_metrics_factors_and_counts_that_are_not_finite_are_refused(
    desk: Desk, value: float
) -> None:
    metrics, normalizers = desk.folder / "m.json", FIXTURES / "normalizers.json"
    metrics.write_text(json.dumps({"loss": value}))
    factors = ["--token-factor", 2, "--sequence-factor", 1]
    assert desk("rescale", metrics, "--normalizers", normalizers, *factors) == 2
    assert "is not a JSON number" in desk.err
    good = FIXTURES / "metrics.json"
    factors = ["--token-factor", 2, "--sequence-factor", value]
    assert desk("rescale", good, "--normalizers", normalizers, *factors) == 2
    assert "--sequence-factor" in desk.err
    counts = desk.save({"counts": torch.tensor([1.0, value, 2, 3])})
    out = desk.folder / "d2t.safetensors"
    assert desk("build-d2t", counts, "--draft-vocab-size", 2, "-o", out) == 2
    assert "finite" in desk.err
    assert not out.exists()


@NOT_FINITE
def test_inspect_counts_what_is_not_finite(desk: Desk, value: float) -> None:
    bad = desk.poisoned(BATCH, "advantages", (3, 10), value)
    report = desk.report("inspect", bad)
    assert report["passed"]
    assert str(1) in json.dumps(report["stats"])
    assert desk("inspect", bad) == 0
    assert ("NaN" if math.isnan(value) else "Inf").lower() in desk.out.lower()


# Integers at their edges


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_ids_at_both_edges_of_every_integer_dtype_are_moved_and_verified(
    desk: Desk, dtype: torch.dtype
) -> None:
    edges = torch.iinfo(dtype)
    tensors = small([3, 2], 4)
    ids = tensors["input_ids"].to(dtype).numpy().copy()
    ids[0, :2] = edges.max, edges.min
    desk.everything(tensors | {"input_ids": torch.from_numpy(ids)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_ids_that_are_no_integers_are_refused(desk: Desk, dtype: torch.dtype) -> None:
    tensors = small([3, 2], 4)
    batch = desk.save(tensors | {"input_ids": tensors["input_ids"].to(dtype)})
    for status in (desk.pack(batch), desk.build_mask(batch)):
        assert status == 2
        assert "input_ids is" in desk.err
        assert "an integer dtype is expected" in desk.err


@pytest.mark.parametrize("dtype", [*SIGNED[1:], *UNSIGNED[1:]], ids=str)
def test_lengths_offsets_and_masks_may_have_any_integer_dtype(
    desk: Desk, dtype: torch.dtype
) -> None:
    tensors = small([3, 2, 4], 4, sample_mask=torch.tensor([1, 0, 1]).to(dtype))
    tensors["token_mask"] = tensors["token_mask"].to(dtype)
    tensors["input_lengths"] = tensors["input_lengths"].to(dtype)
    desk.everything(tensors, "--cp", 2)
    # And the offsets of a dump.
    assert desk.build_mask(desk.folder / "t.safetensors") == 0
    mask = desk.folder / "mask.safetensors"
    dump = load_file(mask)
    cast = {name: dump[name].to(dtype) for name in dump if name != "draft_token_mask"}
    save(mask, dump | cast)
    assert desk.verify_mask(desk.folder / "t.safetensors") == 0, desk.out + desk.err


@pytest.mark.parametrize("mask", [torch.bool, torch.int64, torch.uint8, torch.float16], ids=str)
@pytest.mark.parametrize("sample", [torch.bool, torch.int32, torch.float64], ids=str)
def test_the_draft_mask_has_the_dtype_of_the_product_of_any_two_masks(
    desk: Desk, mask: torch.dtype, sample: torch.dtype
) -> None:
    tensors = small([3, 2, 4], 4)
    tensors["token_mask"] = tensors["token_mask"].to(mask)
    tensors["sample_mask"] = torch.tensor([1, 0, 1]).to(sample)
    desk.everything(tensors)
    packed = load_file(desk.folder / "packs" / "pack-00000.safetensors")["draft_token_mask"]
    assert packed.dtype == (tensors["token_mask"] * tensors["sample_mask"][:, None]).dtype
    assert packed.tolist() == [[1, 1, 0, 0, 0, 1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        (torch.tensor([-1, 2]), "input_lengths[0] is -1; a length in 0..4"),
        (torch.tensor([3, 5]), "input_lengths[1] is 5, past the row width 4"),
        (torch.tensor([3, 2**63 - 1]), "input_lengths[1] is 9223372036854775807, past"),
        (torch.tensor([3, -(2**63)]), "input_lengths[1] is -9223372036854775808"),
        (torch.tensor([3.0, 2.0]), "input_lengths is F32; an integer dtype"),
        (torch.tensor([True, True]), "input_lengths is BOOL"),
        (torch.tensor([3, 2, 1]), "input_lengths is [3]; [2] is expected"),
        (torch.tensor([[3], [2]]), "input_lengths is [2, 1]; [2] is expected"),
        (torch.tensor([0, 2]), "row 0 of length 0 cannot be packed"),
    ],
)
def test_lengths_that_cannot_be_are_refused_by_row(
    desk: Desk, lengths: torch.Tensor, says: str
) -> None:
    batch = desk.save(small([3, 2], 4) | {"input_lengths": lengths})
    for status in (desk.pack(batch), desk.build_mask(batch)):
        assert status == 2
        assert says in desk.err


def test_the_greatest_length_of_uint64_is_refused_too(desk: Desk) -> None:
    lengths = torch.tensor([3, -1]).view(torch.uint64)
    batch = desk.save(small([3, 2], 4) | {"input_lengths": lengths})
    assert desk.pack(batch) == 2
    assert "input_lengths[1] is 18446744073709551615, past the row width 4" in desk.err


def test_ids_outside_the_vocabulary_are_told_of_and_never_counted(desk: Desk) -> None:
    tensors = small([4, 2], 4)
    for stray in (-1, -(2**63), 512, 2**63 - 1):
        tensors["input_ids"][0, 1] = stray
        out = desk.folder / "d2t.safetensors"
        report = desk.report(
            *["build-d2t", desk.save(tensors), "-o", out, "--force"],
            *["--draft-vocab-size", 3, "--vocab-size", 512],
        )
        assert [c["status"] for c in report["checks"] if "id" in c["message"]].count("warn") == 1
        chosen = (torch.arange(3) + load_file(out)["d2t"]).tolist()
        assert chosen == [3, 4, 12]


# Empty, single, smaller than what it is cut for


@pytest.mark.parametrize(
    ("lengths", "width", "geometry"),
    [
        ([1], 1, []),
        ([1], 1, ["--cp", 8]),
        ([1], 9, ["--cp", 2, "--tp", 2, "--sequence-parallel"]),
        ([3, 1, 2], 4, ["--cp", 16, "--tp", 4, "--sequence-parallel"]),
        ([1, 1, 1, 1], 1, ["--max-tokens", 1]),
        ([2, 1], 2, ["--fp8", "blockwise", "--tail", "segment"]),
        ([2, 1], 2, ["--pad-packed-to", 64, "--cp", 4]),
        ([4, 4], 4, []),
    ],
)
def test_batches_of_one_row_or_token_and_cp_above_the_sequence(
    desk: Desk, lengths: list[int], width: int, geometry: list[object]
) -> None:
    batch = small(lengths, width)
    if "--max-tokens" in geometry:
        del batch["token_mask"]
    desk.everything(batch, *geometry)


@pytest.mark.parametrize(
    "more",
    [
        {"features": torch.rand(2, 4, 3)},
        {"features": torch.zeros(2, 4, 0)},
        {"of_rows": torch.zeros(2, 0)},
        {"features": torch.rand(2, 4, 2, 3).to(torch.float8_e5m2)},
    ],
    ids=["[B,S,3]", "[B,S,0]", "[B,0]", "[B,S,2,3] of fp8"],
)
def test_tensors_of_other_dimensions_are_carried_also_those_with_no_elements(
    desk: Desk, more: dict[str, torch.Tensor]
) -> None:
    desk.everything(small([3, 2], 4, **more), "--cp", 2)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "input_ids is [2, 0]: an empty"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, "input_ids is [0, 4]: an empty"),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, "input_ids is [4]; [B, S] is expected"),
        ({"token_mask": torch.ones(2, 4)}, "no tensor input_ids"),
        (small([3, 2], 4) | {"step": torch.tensor(3)}, "step is [], neither [B, S, ...] nor"),
        (small([3, 2], 4) | {"token_mask": torch.ones(2, 5)}, "token_mask"),
        (small([3, 2], 4) | {"token_mask": torch.ones(2)}, "token_mask"),
        (small([3, 2], 4) | {"sample_mask": torch.ones(2, 4)}, "sample_mask"),
        (small([3, 2], 4) | {"sample_mask": torch.ones(3)}, "sample_mask"),
    ],
)
def test_batches_that_are_none_are_refused(
    desk: Desk, tensors: dict[str, torch.Tensor], says: str
) -> None:
    batch = desk.save(tensors)
    assert desk.pack(batch) == 2
    assert str(batch) in desk.err
    assert says in desk.err
    assert not (desk.folder / "packs").exists()


def test_a_batch_without_a_token_to_train_on_is_warned_about(desk: Desk) -> None:
    desk.everything(small([3, 2], 4, sample_mask=torch.zeros(2)))
    report = desk.report(
        "verify-mask", desk.folder / "mask.safetensors", "--batch", desk.folder / "t.safetensors"
    )
    assert report["summary"]["warned"] > 0
    line = ["--draft-vocab-size", 2, "--vocab-size", 99, "-o", desk.folder / "d2t.safetensors"]
    assert desk("build-d2t", desk.folder / "t.safetensors", *line) == 2
    assert "no token was counted" in desk.err


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_vocabulary_as_large_as_the_target_one_is_the_identity(desk: Desk, tp: int) -> None:
    out = desk.folder / "d2t.safetensors"
    argv = ["--draft-vocab-size", 320, "--vocab-size", 320]
    assert desk("build-d2t", BATCH, *argv, "-o", out) == 0, desk.err
    assert load_file(out)["d2t"].tolist() == [0] * 320
    assert desk("verify-d2t", out, "--vocab-size", 320, "--tp", tp) == 0, desk.out
    mapped = desk.folder / "mapped.safetensors"
    assert desk("map-d2t", LOGITS, "--d2t", out, "--tp", tp, "-o", mapped) == 0, desk.err
    (name,) = load_file(mapped)
    assert bits(load_file(mapped)[name]) == bits(load_file(LOGITS)["teacher_full_logits"])


def test_a_draft_vocabulary_of_one_token_works(desk: Desk) -> None:
    out = desk.folder / "d2t.safetensors"
    argv = ["--draft-vocab-size", 1, "--vocab-size", 320]
    assert desk("build-d2t", BATCH, *argv, "-o", out) == 0, desk.err
    assert desk("verify-d2t", out, "--vocab-size", 320) == 0, desk.out
    assert desk("map-d2t", LOGITS, "--d2t", out, "-o", desk.folder / "m.safetensors") == 0
    assert desk("build-d2t", BATCH, "--draft-vocab-size", 321, *argv[2:], "-o", out) == 2
