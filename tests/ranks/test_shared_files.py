"""One file that several ranks fill is the file that one writer makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opdtool.io.outdir import OutputDir, OutputPart
from opdtool.io.writer import spec_of

VALUES = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def test_parts_of_two_writers_are_one_file_with_its_hash(tmp_path: Path) -> None:
    specs = [spec_of("values", VALUES)]
    with OutputDir(tmp_path / "out") as out:
        out.save_tensors("whole.safetensors", {"values": VALUES})
        written = 0
        for rows in (slice(2, 4), slice(0, 2)):  # in whatever order, by whichever process
            part = OutputPart(out.work)
            with part.tensor_file("shared.safetensors", specs, shared=True) as file:
                file.write("values", VALUES[rows], rows.start)
            assert part.files == []
            assert file.written == 48
            written += file.written
        out.seal("shared.safetensors", specs, written)
        shared, whole = out.files
        assert (shared.name, whole.name) == ("shared.safetensors", "whole.safetensors")
        assert shared.to_record() | {"name": ""} == whole.to_record() | {"name": ""}
        out.finish("{}")
    made = [tmp_path / "out" / f"{name}.safetensors" for name in ("shared", "whole")]
    assert made[0].read_bytes() == made[1].read_bytes()


def test_a_file_that_is_not_whole_is_refused_and_so_is_a_part_that_failed(tmp_path: Path) -> None:
    specs = [spec_of("values", VALUES)]
    with OutputDir(tmp_path / "out") as out:
        part = OutputPart(out.work)
        with part.tensor_file("shared.safetensors", specs, shared=True) as file:
            file.write("values", VALUES[:3])
        with pytest.raises(RuntimeError, match="72 bytes of 96"):
            out.seal("shared.safetensors", specs, file.written)
        # Another rank's failure leaves what this one wrote for the driver to take away.
        with (
            pytest.raises(KeyError),
            OutputPart(out.work).tensor_file("shared.safetensors", specs, shared=True),
        ):
            raise KeyError
        assert (out.work / "shared.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == []
