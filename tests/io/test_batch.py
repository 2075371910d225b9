"""Batches: which tensor is what, lengths, several files, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.io.batch import Batch, open_batch
from opdtool.io.pread import SourceFile
from tests.io.test_tensors import scratch

Tensors = dict[str, Tensor]


def make(rows: int, width: int, seed: int = 0) -> Tensors:
    """A batch with every kind of tensor."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    return {
        "input_ids": torch.randint(1, 99, (rows, width), generator=generator),
        "input_lengths": lengths,
        "token_mask": torch.rand(rows, width, generator=generator),
        "sample_mask": torch.ones(rows),
        "hidden": torch.randn(rows, width, 3, generator=generator).bfloat16(),
        "tags": torch.arange(rows * 2).reshape(rows, 2),
    }


def opened(tmp_path: Path, *batches: Tensors) -> Batch:
    """The batch of one file for each."""
    paths = []
    for number, tensors in enumerate(batches):
        paths.append(tmp_path / f"{number}.safetensors")
        save_file(tensors, paths[-1])
    return open_batch(paths)


def refusal(tmp_path: Path, *batches: Tensors) -> str:
    """The sentence with which a batch is refused."""
    with pytest.raises(InputError) as error:
        opened(tmp_path, *batches)
    return str(error.value)


def test_tensors_are_told_apart_by_their_shapes(tmp_path: Path) -> None:
    batch = opened(tmp_path, {**make(4, 6), "cu_seqlens": torch.arange(9), "step": torch.ones(())})
    assert (batch.rows, batch.width) == (4, 6)
    assert batch.token_aligned == ("hidden", "input_ids", "token_mask")
    assert batch.row_aligned == ("input_lengths", "sample_mask", "tags")
    assert batch.others == ("cu_seqlens", "step")
    assert "cu_seqlens" not in batch
    with pytest.raises(InputError, match=r"step is \[\], neither \[B, S, \.\.\.\]"):
        batch.refuse_others()


def test_a_tensor_can_be_said_to_have_no_tokens(tmp_path: Path) -> None:
    save_file({**make(4, 6), "pooled": torch.ones(4, 6)}, tmp_path / "a.safetensors")
    assert "pooled" in open_batch(tmp_path / "a.safetensors").token_aligned
    batch = open_batch(tmp_path / "a.safetensors", row_aligned=["pooled"])
    assert "pooled" in batch.row_aligned
    batch.refuse_others()
    with pytest.raises(InputError, match="--row-aligned poled: no tensor poled with 4 rows"):
        open_batch(tmp_path / "a.safetensors", row_aligned=["poled"])


def test_several_files_are_one_batch_with_zeros_behind_narrow_rows(tmp_path: Path) -> None:
    one, two = make(3, 4), make(2, 6, seed=1)
    batch = opened(tmp_path, one, two)
    assert (batch.rows, batch.width) == (5, 6)
    ids = torch.zeros(5, 6, dtype=torch.int64)
    ids[:3, :4], ids[3:] = one["input_ids"], two["input_ids"]
    assert torch.equal(batch.read("input_ids"), ids)
    expected = torch.cat([one["input_lengths"], two["input_lengths"]])
    assert batch.lengths.tolist() == expected.tolist()
    assert torch.equal(batch.read("tags"), torch.cat([one["tags"], two["tags"]]))
    assert batch.info("hidden").shape == (5, 6, 3)
    assert batch.info("hidden").nbytes == 5 * 6 * 3 * 2
    assert batch.file_of(3) == (tmp_path / "1.safetensors", 0)
    assert [path.name for path in batch.paths] == ["0.safetensors", "1.safetensors"]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_rows_and_columns_are_what_numpy_picks(data: st.DataObject) -> None:
    sizes = data.draw(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=3)
    )
    parts = [make(rows, width, seed) for seed, (rows, width) in enumerate(sizes)]
    width = max(width for _, width in sizes)
    whole = np.zeros((sum(rows for rows, _ in sizes), width), np.int64)
    paths, at = [], 0
    for number, part in enumerate(parts):
        paths.append(scratch(f"batch{number}.safetensors"))
        save_file(part, paths[-1])
        rows, own = part["input_ids"].shape
        whole[at : at + rows, :own] = part["input_ids"].numpy()
        at += rows
    pick = np.array(data.draw(st.lists(st.integers(0, at - 1), max_size=12)), np.int64)
    first, last = sorted(data.draw(st.tuples(st.integers(0, at), st.integers(0, at))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width))))
    with open_batch(paths) as batch:
        assert batch.read("input_ids", pick).tolist() == whole[pick].tolist()
        read = batch.read("input_ids", pick, slice(left, right))
        assert read.tolist() == whole[pick][:, left:right].tolist()
        read = batch.read("input_ids", slice(first, last), slice(left, right))
        assert read.tolist() == whole[first:last, left:right].tolist()
        assert batch.read("input_ids", slice(first, last)).tolist() == whole[first:last].tolist()


def test_rows_are_read_and_not_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = opened(tmp_path, {"input_ids": torch.zeros(1000, 2000, dtype=torch.int64)})
    asked: list[int] = []
    real = SourceFile.read_into

    def counting(self: SourceFile, view: memoryview, offset: int) -> None:
        asked.append(view.nbytes)
        real(self, view, offset)

    monkeypatch.setattr(SourceFile, "read_into", counting)
    batch.read("input_ids", slice(10, 12))
    assert sum(asked) == 2 * 2000 * 8


def test_chunks_of_rows_cover_the_batch(tmp_path: Path) -> None:
    batch = opened(tmp_path, make(5, 4))
    chunks = list(batch.row_chunks("input_ids", 2 * 4 * 8))
    assert [(part.start, part.stop) for part in chunks] == [(0, 2), (2, 4), (4, 5)]
    assert [part.stop - part.start for part in batch.row_chunks("input_ids", 1)] == [1] * 5


def test_lengths_come_from_the_attention_mask_or_the_width(tmp_path: Path) -> None:
    ids = torch.ones(3, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    kinds = [
        torch.int64, torch.int8, torch.uint8, torch.bool, torch.float32, torch.bfloat16,
        torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    ]  # fmt: skip
    for dtype in kinds:
        batch = opened(tmp_path, {"input_ids": ids, "attention_mask": mask.to(dtype)})
        assert batch.lengths.tolist() == [2, 0, 4]
        assert batch.lengths_from == "attention_mask"
    batch = opened(tmp_path, {"input_ids": ids})
    assert batch.lengths.tolist() == [4, 4, 4]
    assert batch.lengths_from == "width"
    assert batch.lengths.dtype == np.int64


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0, 0, 1, 1], "row 1 is no right-padded prefix: position 1 is 0 and 2 is 1"),
        ([1, 0, 1, 0], "row 1 is no right-padded prefix"),
        ([1, 2, 0, 0], "row 1 has 2 at position 1; 0 and 1 are expected"),
        ([-1, 0, 0, 0], "row 1 has -1 at position 0"),
    ],
)
def test_an_attention_mask_that_is_no_prefix_is_refused(
    row: list[int], reason: str, tmp_path: Path
) -> None:
    ids = torch.ones(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 0, 0], row])
    assert reason in refusal(tmp_path, {"input_ids": ids, "attention_mask": mask})


def test_lengths_and_mask_that_contradict_are_refused(tmp_path: Path) -> None:
    tensors = {
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "input_lengths": torch.tensor([2, 2]),
    }
    message = refusal(tmp_path, tensors)
    assert "input_lengths[1] is 2, but attention_mask row 1 has 1 real tokens" in message
    tensors["input_lengths"] = torch.tensor([2, 1], dtype=torch.int32)
    assert opened(tmp_path, tensors).lengths.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        (torch.tensor([2, 9]), "input_lengths[1] is 9, past the row width 3 of input_ids; pass"),
        (torch.tensor([-1, 2]), "input_lengths[0] is -1; a length in 0..3"),
        (torch.tensor([1.0, 2.0]), "input_lengths is F32; an integer dtype"),
        (torch.tensor([True, True]), "input_lengths is BOOL"),
        (torch.tensor([[1], [2]]), "input_lengths is [2, 1]; [2] is expected"),
        (torch.tensor([1, 2, 3]), "input_lengths is [3]; [2] is expected"),
        (torch.tensor([1, 2**62]), "is 4611686018427387904, past"),
        (torch.tensor([1, 2**63], dtype=torch.uint64), "is 9223372036854775808, past"),
        (torch.tensor([1, 2**32 - 1], dtype=torch.uint32), "is 4294967295, past"),
    ],
)
def test_lengths_that_cannot_be_are_refused_with_the_row(
    lengths: Tensor, reason: str, tmp_path: Path
) -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    message = refusal(tmp_path, {"input_ids": ids, "input_lengths": lengths})
    assert reason in message
    assert str(tmp_path / "0.safetensors") in message


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_lengths_of_any_integer_dtype_are_taken(dtype: torch.dtype, tmp_path: Path) -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    lengths = torch.tensor([0, 3]).to(dtype)
    batch = opened(tmp_path, {"input_ids": ids, "input_lengths": lengths})
    assert batch.lengths.tolist() == [0, 3]


def test_masks_alone_are_a_batch(tmp_path: Path) -> None:
    batch = opened(tmp_path, {"token_mask": torch.ones(3, 5), "sample_mask": torch.ones(3)})
    assert (batch.rows, batch.width) == (3, 5)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"sample_mask": torch.ones(3)}, "no tensor input_ids; it holds sample_mask"),
        ({"input_ids": torch.ones(3)}, "input_ids is [3]; [B, S] is expected"),
        ({"input_ids": torch.ones(3, 1, 2)}, "input_ids is [3, 1, 2]; [B, S] is expected"),
        ({"input_ids": torch.ones(0, 4)}, "an empty batch"),
        ({"input_ids": torch.ones(4, 0)}, "an empty batch"),
        ({"teacher_full_logits": torch.ones(4, 2)}, "[B, S, ...] is expected"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(tensors: Tensors, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(tmp_path, tensors)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("tags"), "no tensor tags, which"),
        (lambda t: t.update(hidden=t["hidden"].float()), "hidden is F32 [2, 6, 3] where"),
        (lambda t: t.update(hidden=t["hidden"][..., :2].contiguous()), "hidden is BF16 [2, 6, 2]"),
        (lambda t: t.update(sample_mask=torch.ones(7)), "sample_mask is F32 [7] where"),
    ],
)
def test_files_that_disagree_are_refused(
    change: Callable[[Tensors], object], reason: str, tmp_path: Path
) -> None:
    two = make(2, 6)
    change(two)
    message = refusal(tmp_path, make(3, 6), two)
    assert reason in message
    assert "1.safetensors" in message


def test_masks_that_are_not_finite_are_refused_with_their_place(tmp_path: Path) -> None:
    one, two = make(3, 4), make(2, 4)
    two["sample_mask"][1] = float("inf")
    two["token_mask"][0, 2] = float("nan")
    batch = opened(tmp_path, one, two)
    with pytest.raises(InputError, match=r"1\.safetensors: sample_mask\[1\] is inf; a finite"):
        batch.sample_mask()
    with pytest.raises(InputError, match=r"1\.safetensors: token_mask\[0, 2\] is nan"):
        batch.token_mask()
    with pytest.raises(InputError, match=r"1\.safetensors: token_mask\[0, 2\] is nan"):
        batch.token_mask(np.array([1, 3]))
    assert batch.token_mask(slice(0, 3)).shape == (3, 4)


def test_masks_of_another_shape_are_refused(tmp_path: Path) -> None:
    batch = opened(
        tmp_path,
        {
            "input_ids": torch.ones(3, 4).int(),
            "sample_mask": torch.ones(3, 1),
            "token_mask": torch.ones(3, 4, 1),
        },
    )
    with pytest.raises(InputError, match=r"sample_mask is \[3, 1\]; \[3\] is expected"):
        batch.sample_mask()
    with pytest.raises(InputError, match=r"token_mask is \[3, 4, 1\]; \[3, 4\] is expected"):
        batch.token_mask()
    batch = opened(tmp_path, {"input_ids": torch.ones(3, 4).int(), "sample_mask": torch.ones(5)})
    with pytest.raises(InputError, match=r"sample_mask is \[5\]; a tensor with 3 rows"):
        batch.sample_mask()
    assert opened(tmp_path, {"input_ids": torch.ones(3, 4).int()}).sample_mask() is None


def test_names_are_those_of_the_rename(tmp_path: Path) -> None:
    save_file({"ids": torch.ones(3, 4).int(), "mask": torch.ones(3, 4)}, tmp_path / "a.safetensors")
    rename = {"input_ids": "ids", "token_mask": "mask"}
    batch = open_batch(tmp_path / "a.safetensors", rename=rename)
    assert batch.token_aligned == ("input_ids", "token_mask")
    assert batch.used_renames == {"input_ids", "token_mask"}


LARGE = """
import resource, sys
import numpy as np
from opdtool.io.batch import open_batch
from opdtool.io.hashing import sha256_file
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
with open_batch(sys.argv[1]) as batch:
    batch.read("input_ids", slice(0, 1)).sum()
    before = peak()
    total = 0
    for rows in batch.row_chunks("input_ids", 8 << 20):
        total += int((batch.read("input_ids", rows) == 0).sum())
    order = np.random.default_rng(0).permutation(batch.rows)
    for first in range(0, batch.rows, 1024):
        batch.read("input_ids", order[first : first + 1024])
    sha256_file(batch.paths[0])
    print(total, peak() - before)
"""


def test_a_batch_larger_than_memory_is_read_in_pieces(tmp_path: Path) -> None:
    """Lengths, chunks, shuffled rows and the hash of 257 MiB, in less than 80 MiB."""
    rows, width = 32_768, 1024
    header = json.dumps(
        {
            "attention_mask": {"dtype": "U8", "shape": [rows, 8], "data_offsets": [0, rows * 8]},
            "input_ids": {
                "dtype": "I64",
                "shape": [rows, width],
                "data_offsets": [rows * 8, rows * 8 + rows * width * 8],
            },
        }
    ).encode()
    path = tmp_path / "large.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + rows * 8 + rows * width * 8)  # all zeros, no blocks
    with pytest.raises(InputError, match=r"attention_mask is \[32768, 8\]"):
        open_batch(path)  # needed for the lengths, so it must fit
    raw = path.open("r+b")
    raw.seek(8)
    raw.write(header.replace(b"attention_mask", b"attention_misc"))
    raw.close()
    command = [sys.executable, "-c", LARGE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    total, grown = done.stdout.split()
    assert int(total) == rows * width, done.stderr
    assert int(grown) < 80


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16),
        *(torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
    ids=str,
)
def test_rows_of_several_files_are_gathered_in_every_dtype(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    one, two = make(3, 4), make(2, 6, seed=1)
    for number, tensors in enumerate((one, two)):
        rows, width = tensors["input_ids"].shape
        tensors["extra"] = (torch.arange(rows * width) % 2 + number).reshape(rows, width).to(dtype)
        tensors["per_row"] = (torch.arange(rows) % 2).to(dtype)
    batch = opened(tmp_path, one, two)
    found = batch.read("extra", np.array([4, 0, 4, 2]), slice(2, 6)).to(torch.float64)
    second, last = [1, 2, 1, 2], [0, 1, 0, 0]
    # Row 4 is 1 + (6..11) % 2 and row 0 of the first file (0..3) % 2, its width four.
    assert found.tolist() == [
        [float(bool(x)) if dtype == torch.bool else float(x) for x in row]
        for row in (second, last, second, last)
    ]
    per_row = batch.read("per_row", np.array([1, 3, 4])).to(torch.float64)
    assert per_row.tolist() == [1, 0, 1]
