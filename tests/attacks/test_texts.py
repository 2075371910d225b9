"""Suites, files of defaults, metrics and normalizers, broken one way each: exit 2, one or two
printable lines, and the file named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opdtool.cli.main import run

STEP = b'[[step]]\ncommand = "explain"\n'
ALL_TEXTS: dict[str, bytes] = {
    "not UTF-8": b"\xff\xfe\x00",
    "UTF-16": "a = 1".encode("utf-16"),
    "NUL": b"a = \x00",
    "a safetensors file": (2).to_bytes(8, "little") + b"{}",
    "deep": b"a = " + b"[" * 100_000,
    "a huge integer": b"a = " + b"9" * 5000,
}
TOML: dict[str, bytes] = {
    **ALL_TEXTS,
    "no TOML": b"[",
    "a key twice": b"a = 1\na = 2\n",
    "a table twice": b"[a]\n[a]\n",
    "an escape that is none": b'a = "\\q"',
    "a control character": b'a = "\x07"',
}
SUITES: dict[str, bytes] = {
    **TOML,
    "empty": b"",
    "no steps": b"step = []\n",
    "steps of another kind": b"step = 1\n",
    "a step that is a text": b'step = ["roll"]\n',
    "no command": b"[[step]]\n",
    "a command that is a number": b"[[step]]\ncommand = 1\n",
    "a command that is none": b'[[step]]\ncommand = "verfy-mask"\n',
    "a command that cannot be shown": b'[[step]]\ncommand = "a\\u001b[2J"\n',
    "itself": b'[[step]]\ncommand = "check"\n',
    "an unknown key": STEP + b"wat = 1\n",
    "a key that cannot be shown": STEP + b'"\\n\\u001b" = 1\n',
    "a very long key": STEP + b'"' + b"x" * 100_000 + b'" = 1\n',
    "a very long value": STEP + b'inputs = ["a", 1, "' + b"x" * 100_000 + b'"]\n',
    "inputs that are a text": STEP + b'inputs = "a"\n',
    "a name that is a number": STEP + b"name = 1\n",
    "a name that cannot be shown": STEP + b'name = "a\\nb\\u001b[31m"\n',
    "an option of another kind": b'[[step]]\ncommand = "verify-mask"\ncp = []\nbatch = [[1]]\n',
    "a flag that is a text": b'[[step]]\ncommand = "roll"\nforce = "yes"\n',
    "a report of its own": b'[[step]]\ncommand = "roll"\nreport = "r.json"\n',
    "defaults that are a list": b"defaults = []\n" + STEP,
    "a default that nothing takes": b"[defaults]\nwat = 1\n" + STEP,
    "a matrix that is a number": b"matrix = 1\n" + STEP,
    "a matrix without values": b"[matrix]\ncp = []\n" + b'[[step]]\ncommand = "verify-mask"\n',
    "a matrix that nothing uses": b"[matrix]\nwat = [1]\n" + STEP,
    "a matrix of a million million steps": b"[matrix]\n"
    + b"".join(b"%c = %s\n" % (97 + i, str(list(range(100))).encode()) for i in range(6))
    + b'[[step]]\ncommand = "explain"\ninputs = ["{a}{b}{c}{d}{e}{f}"]\n',
    "a flag of the suite that is a number": b"continue_on_failure = 1\n" + STEP,
}
DEFAULTS: dict[str, bytes] = {
    **TOML,
    "an unknown option": b"wat = 1\n",
    "an option that cannot be shown": b'"a\\nb" = 1\n',
    "a very long option": b'"' + b"x" * 100_000 + b'" = 1\n',
    "a command that is a value": b"pack = 1\n",
    "an unknown option of a command": b"[pack]\nwat = 1\n",
    "a number that is a table": b"[cp]\na = 1\n",
    "a number that is a text": b'cp = "two"\n',
    "a number that is a date": b"cp = 2020-01-01\n",
    "a word that is none": b'format = "loud"\n',
    "a flag that is a number": b"quiet = 1\n",
    "a very long value": b'format = "' + b"x" * 100_000 + b'"\n',
    "a list of lists": b"must-include = [[1]]\n",
}
JSONS: dict[str, bytes] = {
    "not UTF-8": ALL_TEXTS["not UTF-8"],
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "empty": b"",
    "no JSON": b"{",
    "two values": b"{} {}",
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a list": b"[1]",
    "a number": b"1",
    "a key twice": b'{"kl": 1, "kl": 2}',
    "NaN": b'{"kl": NaN}',
    "infinity": b'{"kl": -Infinity}',
    "a float that is too large": b'{"kl": 1e999}',
    "an integer that is too large": b'{"kl": ' + b"9" * 5000 + b"}",
    "a table in a table": b'{"kl": {"a": 1}}',
    "null": b'{"kl": null}',
    "a flag": b'{"kl": true}',
    "a key that cannot be shown": b'{"a\\n\\u001b[2J": {}}',
    "a very long key": b'{"' + b"x" * 100_000 + b'": {}}',
    "a very long value": b'{"kl": "' + b"x" * 100_000 + b'"}',
}
METRICS: dict[str, bytes] = {
    **JSONS,
    "a text": b'{"kl": "1"}',
    "a list with a text": b'{"kl": [1, "2"]}',
    "a product that is too large": b'{"kl": 1e308}',
    "an integer whose product is too large": b'{"kl": 1' + b"0" * 308 + b"}",
}
NORMALIZERS: dict[str, bytes] = {
    **JSONS,
    "a word that is none": b'{"kl": "tokns"}',
    "a list": b'{"kl": ["tokens"]}',
}
CASES = [
    (kind, name)
    for kind, corpus in (
        ("suite", SUITES),
        ("defaults", DEFAULTS),
        ("pyproject", DEFAULTS),
        ("metrics", METRICS),
        ("normalizers", NORMALIZERS),
    )
    for name in corpus
]


def written(kind: str, name: str, folder: Path) -> tuple[Path, list[str]]:
    """The broken file, and a command line that reads it."""
    good = folder / "good.json"
    good.write_text(json.dumps({"kl": 1} if kind == "normalizers" else {"kl": "tokens"}))
    factors = ["--token-factor", "10", "--sequence-factor", "1"]
    if kind == "suite":
        path = folder / "suite.toml"
        path.write_bytes(SUITES[name])
        return path, ["check", str(path)]
    if kind == "defaults":
        path = folder / "defaults.toml"
        path.write_bytes(DEFAULTS[name])
        return path, ["--config", str(path), "inspect", str(good)]
    if kind == "pyproject":
        path = folder / "pyproject.toml"
        text = DEFAULTS[name]
        if name not in TOML:  # as a table of its own, with the tables in it
            text = b"[tool.opdtool]\n" + text.replace(b"\n[", b"\n[tool.opdtool.")
            text = text.replace(b"[tool.opdtool]\n[", b"[tool.opdtool.")
        path.write_bytes(text)
        return path, ["--config", str(path), "inspect", str(good)]
    path = folder / f"{kind}.json"
    path.write_bytes((METRICS if kind == "metrics" else NORMALIZERS)[name])
    both = [path, good] if kind == "metrics" else [good, path]
    return path, ["rescale", str(both[0]), "--normalizers", str(both[1]), *factors]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_broken_text_is_exit_2_in_one_or_two_lines_that_name_it(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, line = written(kind, name, tmp_path)
    status = run(line)
    out, err = capsys.readouterr()
    assert status == 2, err
    assert out == ""
    rows = err.splitlines()
    assert 1 <= len(rows) <= 2, rows
    assert all(row.isprintable() for row in rows)
    assert path.name in err
    assert len(err) < 1500, err


def test_the_corpora_are_not_one_and_the_same_mistake() -> None:
    assert len(CASES) > 100
    assert len(set(SUITES.values())) == len(SUITES)
    assert len(set(METRICS.values())) == len(METRICS)


def test_an_option_s_value_may_be_two_dashes(tmp_path: Path) -> None:
    from opdtool.cli.suite import expand, read_suite

    suite = tmp_path / "suite.toml"
    suite.write_text('[[step]]\ncommand = "roll"\nname = "x"\noutput = "--"\ninputs = ["a"]\n')
    (step,) = read_suite(suite)
    assert expand(step, tmp_path) == ["roll", "--output", "--", "--", "a"]
