"""``opdtool rescale``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Cli

FACTORS = ("--token-factor", "2", "--sequence-factor", "0.5")


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    metrics = {"kl": 1.5, "reward": 3, "lr": 0.1, "per_step": [1, 2.5], "other": 7}
    kinds = {
        "kl": "tokens",
        "reward": "sequences",
        "lr": "none",
        "per_step": "tokens",
        "gone": "none",
    }
    return write(tmp_path / "m.json", metrics), write(tmp_path / "n.json", kinds)


def test_each_metric_takes_the_factor_of_its_normalizer(cli: Cli, files: tuple[Path, Path]) -> None:
    done = cli("rescale", files[0], "--normalizers", files[1], *FACTORS)
    assert done.status == 0
    assert json.loads(done.out) == {
        "kl": 3.0, "reward": 1.5, "lr": 0.1, "per_step": [2.0, 5.0], "other": 7,
    }  # fmt: skip


def test_a_metric_with_no_normalizer_is_named_on_stderr(cli: Cli, files: tuple[Path, Path]) -> None:
    done = cli("rescale", files[0], "--normalizers", files[1], *FACTORS)
    assert "other" in done.err
    assert "kl" not in done.err


def test_stdin_is_read_and_a_file_is_written(
    cli: Cli, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(b'{"kl": 1}'))
    monkeypatch.setattr("sys.stdin", stdin)
    out = tmp_path / "out.json"
    done = cli("rescale", "-", "--normalizers", files[1], *FACTORS, "-o", out)
    assert (done.status, done.out) == (0, "")
    assert json.loads(out.read_text()) == {"kl": 2.0}
    assert cli("rescale", files[0], "--normalizers", files[1], *FACTORS, "-o", out).status == 2
    assert json.loads(out.read_text()) == {"kl": 2.0}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ("", "JSON"),
        ("[1]", "object"),
        ("{", "JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "7" * 5000 + "}", "an integer of 5,000 digits is too large for a float"),
        ('{"a": -' + "7" * 350 + "}", "too large"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": "1"}', "number"),
        ('{"a": true}', "number"),
        ('{"a": null}', "number"),
        ('{"a": {"b": 1}}', "number"),
        ('{"a": [1, "x"]}', "number"),
        ('{"kl": 1' + "0" * 400 + "}", "too large"),
        ('{"kl": 1' + "0" * 5000 + "}", "JSON"),
        ("[" * 100000, "JSON"),
        ('{"kl": 1e308}', "finite"),
        ('{"\\ud800": "\\u001b[31m"}', "number"),
    ],
)
def test_hostile_metrics_are_exit_2_in_one_or_two_printable_lines(
    cli: Cli, tmp_path: Path, files: tuple[Path, Path], metrics: str, said: str
) -> None:
    bad = write(tmp_path / "bad.json", metrics)
    done = cli("rescale", bad, "--normalizers", files[1], *FACTORS)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert len(done.err.splitlines()) <= 2
    assert done.err.strip().replace("\n", " ").isprintable()


@pytest.mark.parametrize("kind", ["token", "TOKENS", 1, None, ["tokens"]])
def test_another_normalizer_is_refused_by_name(
    cli: Cli, tmp_path: Path, files: tuple[Path, Path], kind: object
) -> None:
    bad = write(tmp_path / "bad.json", {"kl": kind})
    done = cli("rescale", files[0], "--normalizers", bad, *FACTORS)
    assert done.status == 2
    assert "'kl'" in done.err
    assert "tokens, sequences or none" in done.err


def test_bytes_that_are_no_text_a_missing_file_and_two_stdins_are_exit_2(
    cli: Cli, tmp_path: Path, files: tuple[Path, Path]
) -> None:
    raw = tmp_path / "raw.json"
    raw.write_bytes(b'{"a\xff": 1}')
    for argv in (
        ("rescale", raw, "--normalizers", files[1], *FACTORS),
        ("rescale", tmp_path / "none.json", "--normalizers", files[1], *FACTORS),
        ("rescale", tmp_path, "--normalizers", files[1], *FACTORS),
        ("rescale", "-", "--normalizers", "-", *FACTORS),
        ("rescale", files[0], "--normalizers", files[1], *FACTORS, "--token-factor", "nan"),
    ):
        done = cli(*argv)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("error: ")
