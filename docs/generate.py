"""Writes the generated pages, and the outputs shown in the written ones, anew.

    python docs/generate.py

``checks.md`` comes from the registry of checks and faults, ``commands.md`` from the commands'
own options. In every other page, and in the README, each command of a ``console`` block is run
in the folder that ``opdtool demo`` writes, and what it prints is put below it. A test holds the
pages to what this makes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from docs.quick import quick_opdtool  # noqa: E402

MARK = "__opdtool_docs__"


def checks_page() -> str:
    """One section for each check and each known fault."""
    from opdtool.checks.registry import checks, faults

    return "\n".join([*_checks_head(), *_checks(checks()), *_faults(faults())]).rstrip() + "\n"


def _checks_head() -> Iterator[str]:
    yield "# Checks and known faults"
    yield ""
    yield "Made from the tool's own registry; `opdtool explain CODE_OR_FAULT` prints one section."
    yield ""
    yield "A check has a code. Hundreds are subjects: 1xx layout of a pack, 2xx its content, 3xx"
    yield "masks, 4xx draft vocabularies, 5xx teacher logits, 6xx metrics, 7xx ranks, 9xx files."
    yield "A failed check is diagnosed: opdtool builds what each known fault would have made from"
    yield "the same inputs, and names the fault whose result equals the dump."
    yield ""


def _checks(found: dict[str, Any]) -> Iterator[str]:
    yield "## Checks"
    yield ""
    for info in found.values():
        yield f"### {info.code} {info.name}"
        yield ""
        yield from _explanation(info)


def _faults(found: dict[str, Any]) -> Iterator[str]:
    yield "## Known faults"
    yield ""
    for info in found.values():
        yield f"### {info.name}"
        yield ""
        yield from _explanation(info)
        yield f"Looked for by {', '.join(f'`{name}`' for name in info.commands)}."
        yield ""


def _explanation(info: Any) -> Iterator[str]:
    yield _prose(info.statement)
    yield ""
    for title, text in (
        ("Why it matters", info.why),
        ("Usual cause", info.cause),
        ("Fix", info.fix),
    ):
        first, *rest = text.split("\n")
        # Lines below the first are code, as the registry has it.
        yield f"**{title}.** {_prose(first)}"
        if rest:
            yield ""
            yield "```python"
            yield from rest
            yield "```"
        yield ""


def _prose(text: str) -> str:
    from opdtool.cli.explain import as_sentence

    return as_sentence(text).replace("<", "&lt;").replace("*", "\\*")


def commands_page() -> str:
    """Every command with its arguments and options."""
    from opdtool.cli.main import load
    from opdtool.cli.start import COMMANDS

    rows = [
        "# Commands",
        "",
        "Made from the commands themselves; `opdtool COMMAND --help` shows the same.",
        "",
        "Defaults of options can come from a file or from the environment: see",
        "[configuration](configuration.md).",
        "",
    ]
    for name in COMMANDS:
        rows += _command(name, load(name))
    return "\n".join(rows).rstrip() + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    parameters = [p for p in command.params if p.name != "help"]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    usage = " ".join(["opdtool", name, *(p.metavar or p.name.upper() for p in arguments)])
    yield f"## opdtool {name}"
    yield ""
    yield from (command.help or "").strip().split("\n")
    yield ""
    yield "```text"
    yield f"{usage} [OPTIONS]"
    yield "```"
    yield ""
    yield "| | | default |"
    yield "| --- | --- | --- |"
    for parameter in parameters:
        spelling, words = _spelling(name, parameter), _cell(parameter.help or "")
        yield f"| {spelling} | {words} | {_default(parameter)} |"
    yield ""


def _spelling(name: str, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if parameter.is_flag else " " + _value_name(name, parameter)
    spellings = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{_cell(text + value)}`" for text in spellings)


def _value_name(name: str, parameter: Any) -> str:
    from opdtool.cli.shapes import options

    if parameter.metavar:
        return str(parameter.metavar)
    shape = options(name)[parameter.opts[-1].lstrip("-")]
    if issubclass(shape.kind, Enum):
        return "|".join(str(choice.value) for choice in shape.kind)
    return {int: "N", float: "X"}.get(shape.kind, "PATH" if shape.path else "TEXT")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or value == []:
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def workspace(folder: Path) -> Path:
    """What ``opdtool demo`` leaves in ``folder``, with the checkout's ``docs`` beside it."""
    demo = [sys.executable, "-m", "opdtool", "demo", str(folder)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPDTOOL_")}
    subprocess.run(demo, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL, timeout=300)
    if not (docs := folder.parent / "docs").exists():
        docs.symlink_to(DOCS)
    return folder


Command = tuple[int, int, str]
"""A command of a page: its first line, the line after its output, and its text."""


def commands_in(text: str) -> list[Command]:
    """The commands of a page's ``console`` blocks. One ends where its lines stop ending in
    a backslash; its output at the next command or the end of the block."""
    rows, inside = text.split("\n"), False
    found: list[Command] = []
    for number, row in enumerate(rows):
        if row.startswith("```"):
            if inside and found:
                found[-1] = (found[-1][0], number, found[-1][2])
            inside = row == "```console"
        elif inside and row.startswith("$ "):
            if found and found[-1][1] < 0:
                found[-1] = (found[-1][0], number, found[-1][2])
            last, command = number, row[2:]
            while rows[last].endswith("\\"):
                last += 1
                command += "\n" + rows[last]
            found.append((number, -1, command))
    return found


def run_commands(commands: Sequence[str], folder: Path) -> list[str]:
    """What each command prints, standard output and error together, run one after the other
    by one shell in ``folder``. A page's ``$?`` is that of the command before."""
    script = ["status=0"]
    for command in commands:
        shown = f"{{\n(exit $status)\n{command}\nstatus=$?\n}} 2>&1"
        script.append(f"{shown}\nprintf '%s' {MARK}")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OPDTOOL_", "GITHUB_"))}
    env |= {"TERM": "dumb", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = str(ROOT)
    with quick_opdtool(env) as quick:
        env["PATH"] = f"{quick}{os.pathsep}{env['PATH']}"
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    outputs = done.stdout.split(MARK)[:-1]
    if len(outputs) != len(commands):
        raise RuntimeError(f"{commands[len(outputs)]}: ended the shell: {done.stderr}")
    return outputs


def with_outputs(text: str, outputs: Sequence[str]) -> str:
    """The page with these outputs below its commands."""
    rows = text.split("\n")
    found = commands_in(text)
    for (start, end, command), output in reversed(list(zip(found, outputs, strict=True))):
        shown = output.rstrip("\n").split("\n") if output.strip("\n") else []
        head = rows[start : start + command.count("\n") + 1]
        more = end < len(rows) and rows[end].startswith("$ ") and shown
        rows[start:end] = [*head, *shown, *([""] if more else [])]
    return "\n".join(rows)


def fenced(text: str, *kinds: str) -> list[str]:
    """The contents of a page's fenced blocks of these kinds."""
    pattern = rf"^```(?:{'|'.join(kinds)})\n(.*?)^```$"
    return re.findall(pattern, text, re.M | re.S)


def written_pages() -> list[Path]:
    """The pages that people write, whose outputs are made here."""
    made = {"checks.md", "commands.md"}
    return [ROOT / "README.md", *(p for p in sorted(DOCS.glob("*.md")) if p.name not in made)]


def prepare(text: str, folder: Path) -> None:
    """``python`` blocks whose first line is a comment with a file's name become that file."""
    for block in fenced(text, "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        if name:
            (folder / name[1]).write_text(block, encoding="utf-8")


def remade(page: Path) -> str:
    """A written page with its outputs made anew, in a fresh copy of the example data."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        folder = workspace(Path(scratch) / "data")
        prepare(text, folder)
        commands = [command for _, _, command in commands_in(text)]
        outputs = run_commands(commands, folder)
    for command, output in zip(commands, outputs, strict=True):
        if "internal error:" in output:
            raise RuntimeError(f"{page}: `{command}` is broken:\n{output}")
    return with_outputs(text, outputs)


def main() -> None:
    """Write everything."""
    (DOCS / "checks.md").write_text(checks_page(), encoding="utf-8")
    (DOCS / "commands.md").write_text(commands_page(), encoding="utf-8")
    for page in written_pages():
        page.write_text(remade(page), encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
