"""Mutation testing: does a test fail when the code is wrong?

    python -m tools.mutation                     every module that has tests mapped to it
    python -m tools.mutation core/masks          one
    python -m tools.mutation --sample 50         50 mutants of each, the same ones every time

One process imports torch and pytest once and forks a child for every mutant. The child puts
the changed module in the place of the right one and runs the tests mapped to the module. A
mutant is *killed* when a test fails, when the child dies, or when it takes several times the
time that the right code takes. Those that survive and change nothing that could be seen are
listed, each with its reason, in ``tools/equivalent_mutants.toml``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import select
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType

from tools.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
MEMORY = 12 << 30
"""Address space of a child: a mutant that allocates without end dies instead of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one mutant: killed, timeout (killed too), equivalent or survived."""

    module: str
    mutant: Mutant
    outcome: str
    seconds: float


@dataclass(slots=True)
class Tally:
    """Outcomes of one module."""

    module: str
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def made(self) -> int:
        """Mutants tried, less the equivalent ones: those that could be noticed."""
        return sum(self.counts.values()) - self.counts["equivalent"]

    @property
    def killed(self) -> int:
        """Mutants that a test noticed."""
        return self.counts["killed"] + self.counts["timeout"]


def mapped_tests() -> dict[str, list[str]]:
    """Which tests are run for the mutants of which module, quickest first."""
    from tools.mutation_map import TESTS

    return {module: list(tests) for module, tests in TESTS}


def equivalent() -> dict[tuple[str, str, str], str]:
    """(module, function, change) of mutants that change nothing, and why."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("equivalent", [])
    return {(e["module"], e["function"], e["change"]): e["reason"] for e in listed}


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from other code than its file holds."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self._name, self._path, self._code = name, path, code

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=_Loader(self))

    def code(self) -> CodeType:
        """The changed module."""
        return self._code


class _Loader(importlib.abc.Loader):
    def __init__(self, changed: _Changed) -> None:
        self._changed = changed

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._changed.code(), module.__dict__)


def _run_tests(module: str, tree_code: CodeType | None, tests: Sequence[str], seconds: int) -> int:
    """In the child: run the tests; returns pytest's exit status."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if tree_code is not None:
        name = "opdtool." + module.replace("/", ".")
        path = ROOT / "opdtool" / f"{module}.py"
        sys.meta_path.insert(0, _Changed(name, path, tree_code))
    out = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("MUTATION_SHOW"):
        os.dup2(out, 1)
        os.dup2(out, 2)
    _quick_hypothesis()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    return int(pytest.main([*options, "--no-header", "--tb=no", *tests]))


def _quick_hypothesis() -> None:
    """No shrinking of what failed, no memory of it, the same examples for every mutant."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutation",
        phases=(Phase.explicit, Phase.generate),
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")


@dataclass(slots=True)
class _Child:
    pid: int
    begun: float
    module: str
    mutant: Mutant | None


def _fork(
    module: str, mutant: Mutant | None, source: str, tests: Sequence[str], seconds: int
) -> _Child:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return _Child(pid, time.monotonic(), module, mutant)
    status = 99
    try:
        os.setsid()
        path = str(ROOT / "opdtool" / f"{module}.py")
        code = None if mutant is None else compile(mutant.tree(source), path, "exec")
        status = _run_tests(module, code, tests, seconds)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(child: _Child, wall: float) -> str:
    """How a child ended."""
    handle = os.pidfd_open(child.pid)
    left = child.begun + wall - time.monotonic()
    ended = select.select([handle], [], [], max(left, 0.0))[0]
    os.close(handle)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    if not ended or status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    if status in (99, 4, 5):
        raise SystemExit(f"{child.module}: the tests could not be run (status {status})")
    return "survived" if status == 0 else "killed"


def _try_module(
    module: str, tests: Sequence[str], sample: int | None, seed: int, jobs: int, verbose: bool
) -> list[Outcome]:
    source = (ROOT / "opdtool" / f"{module}.py").read_text(encoding="utf-8")
    known = equivalent()
    mutants = mutants_of(source)
    if sample is not None and sample < len(mutants):
        picked = random.Random(f"{seed}:{module}").sample(range(len(mutants)), sample)
        mutants = [mutants[i] for i in sorted(picked)]
    same = [m for m in mutants if (module, m.function, m.change) in known]
    waiting = [m for m in mutants if (module, m.function, m.change) not in known]
    outcomes = [Outcome(module=module, mutant=m, outcome="equivalent", seconds=0.0) for m in same]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if _wait(_fork(module, None, source, tests, 600), 900) != "survived":
        raise SystemExit(f"{module}: its tests fail on the right code: {' '.join(tests)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    right = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = int(10 + 4 * right)
    running: list[_Child] = []
    waiting.reverse()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_fork(module, waiting.pop(), source, tests, seconds))
        child = running.pop(0)
        outcome = _wait(child, 6.0 * seconds)
        assert child.mutant is not None
        took = time.monotonic() - child.begun
        outcomes.append(Outcome(module=module, mutant=child.mutant, outcome=outcome, seconds=took))
        if verbose or outcome == "survived":
            m = child.mutant
            print(f"{outcome:9} {module}.py:{m.line} {m.function}: {m.change}", flush=True)
    return outcomes


def _table(tallies: Sequence[Tally]) -> str:
    lines = [f"{'module':34} {'made':>6} {'killed':>7} {'equivalent':>11} {'survived':>9} {'%':>7}"]
    total = Tally("all")
    for tally in tallies:
        total.counts.update(tally.counts)
    for t in [*tallies, total]:
        share = f"{100 * t.killed / t.made:.1f}" if t.made else "-"
        lines.append(
            f"{t.module:34} {t.made:6} {t.killed:7} {t.counts['equivalent']:11} "
            f"{t.counts['survived']:9} {share:>7}"
        )
    return "\n".join(lines)


def _as_json(outcomes: Sequence[Outcome], options: argparse.Namespace) -> str:
    rows = [
        {
            "module": o.module,
            "line": o.mutant.line,
            "function": o.mutant.function,
            "change": o.mutant.change,
            "outcome": o.outcome,
            "seconds": round(o.seconds, 2),
        }
        for o in outcomes
    ]
    head = {"schema": "opdtool.mutation/1", "sample": options.sample, "seed": options.seed}
    return json.dumps({**head, "mutants": rows}, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants; 1 when one survives that is not listed as equivalent."""
    parser = argparse.ArgumentParser(prog="mutation", description=str(__doc__).split("\n")[0])
    parser.add_argument("modules", nargs="*", help="such as core/masks; all that are mapped")
    parser.add_argument("--sample", type=int, help="at most this many mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also write every mutant's outcome here")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="show those killed too")
    options = parser.parse_args(argv)
    mapped = mapped_tests()
    modules = options.modules or [module for module, tests in mapped.items() if tests]
    for module in modules:
        if not mapped.get(module):
            parser.error(f"no tests are mapped to {module}; see tools/mutation_map.py")
    if options.list:
        for module in modules:
            source = (ROOT / "opdtool" / f"{module}.py").read_text(encoding="utf-8")
            for m in mutants_of(source):
                print(f"{module}.py:{m.line} {m.function}: {m.change}")
        return 0
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401

    tallies, outcomes = [], []
    for module in modules:
        found = _try_module(
            module, mapped[module], options.sample, options.seed, options.jobs, options.verbose
        )
        outcomes += found
        tallies.append(Tally(module, Counter(o.outcome for o in found)))
        print(_table(tallies[-1:]).splitlines()[1], flush=True)
        if options.json:
            options.json.write_text(_as_json(outcomes, options), encoding="utf-8")
    print(_table(tallies))
    return 1 if any(tally.counts["survived"] for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
