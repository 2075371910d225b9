"""Commands that are killed, limited and starved, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    seconds: float
    sent: bool
    out: str
    err: str
    peak: int


class Server:
    """Runs command lines in forks; see :mod:`tests.robust.server`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.robust.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
        )

    def __call__(self, *argv: object, **more: Any) -> Ended:
        self.begin(*argv, **more)
        return self.end()

    def begin(self, *argv: object, **more: Any) -> None:
        """Begin a command without waiting for its end."""
        assert self._process.stdin is not None
        request = {"argv": [str(word) for word in argv], **more}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def end(self) -> Ended:
        """Wait for the command that was begun."""
        assert self._process.stdout is not None
        ended = Ended(**json.loads(self._process.stdout.readline()))
        assert "Traceback" not in ended.err
        return ended

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def run() -> Iterator[Server]:
    """``run("pack", path, "-o", out, after=0.1, signal=9)``."""
    server = Server()
    server("--version")
    yield server
    server.close()


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """The tensors as a safetensors file."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def a_batch(rows: int, width: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch with random lengths, masks and advantages."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    real = torch.arange(width) < lengths[:, None]
    return {
        "input_ids": torch.randint(1, 500, (rows, width), generator=random) * real,
        "input_lengths": lengths,
        "token_mask": (real & (torch.arange(width) > width // 4)).float(),
        "sample_mask": (torch.arange(rows) % 7 != 3).float(),
        "advantages": torch.rand((rows, width), generator=random) * real,
    }


def contents(path: Path) -> dict[str, bytes] | bytes | None:
    """Every byte under a final name: a file's, a directory's by name, or None."""
    if path.is_dir():
        return {each.name: each.read_bytes() for each in sorted(path.iterdir())}
    return path.read_bytes() if path.exists() else None


def leftovers(folder: Path) -> list[str]:
    """What lies in a folder besides plain names: locks, and what was being built."""
    return sorted(each.name for each in folder.iterdir() if each.name.startswith("."))
