"""The mutants that are tried, and the list of those that change nothing."""

from __future__ import annotations

import ast

import pytest

from tools.mutants import mutants_of
from tools.mutation import ROOT, equivalent, main, mapped_tests
from tools.mutation_map import UNMAPPED

SOURCE = '''
"""A docstring with 1 number."""
LIMIT = 3


def cut(values: list[int], first: int = 0) -> int:
    """Another docstring."""
    assert first < 2
    if first < LIMIT and not values:
        raise ValueError(f"{first} is too small")
    total = max(values[first:]) + 1
    for left, right in zip(values, values, strict=True):
        total -= left * right
    return total
'''


def changes() -> list[str]:
    return [f"{m.function}: {m.change}" for m in mutants_of(SOURCE)]


@pytest.mark.parametrize(
    "change",
    [
        ": 3 -> 4",
        "cut: 0 -> 1",
        "cut: first < LIMIT -> first <= LIMIT",
        "cut: first < LIMIT and (not values) -> first < LIMIT or not values",
        "cut: not values -> values",
        "cut: raise ValueError(f'{first} is too small') -> pass",
        "cut: max(values[first:]) -> min(values[first:])",
        "cut: first: -> :",
        "cut: max(values[first:]) + 1 -> max(values[first:]) - 1",
        "cut: 1 -> 2",
        "cut: 1 -> 0",
        "cut: total -= left * right -> total += left * right",
        "cut: total -= left * right -> pass",
        "cut: left * right -> left + right",
    ],
)
def test_each_kind_of_change_is_made(change: str) -> None:
    assert changes().count(change) == 1


def test_annotations_docstrings_assertions_and_strict_zips_are_left_alone() -> None:
    assert len(changes()) == 15  # those above, and the condition negated
    for words in ("docstring", "assert", "strict=False", "first < 2"):
        assert not any(words in change for change in changes())


def test_every_mutant_compiles_and_differs_from_its_source() -> None:
    plain = ast.unparse(ast.parse(SOURCE))
    made = mutants_of(SOURCE)
    assert made
    for mutant in made:
        tree = mutant.tree(SOURCE)
        compile(tree, "cut.py", "exec")
        assert ast.unparse(tree) != plain


def test_every_equivalent_mutant_that_is_listed_is_still_one_and_has_a_reason() -> None:
    known = equivalent()
    assert known
    for module in {module for module, _, _ in known}:
        source = (ROOT / "opdtool" / f"{module}.py").read_text(encoding="utf-8")
        made = {(m.function, m.change) for m in mutants_of(source)}
        listed = {(f, change) for where, f, change in known if where == module}
        assert listed <= made, f"{module}: {sorted(listed - made)}"
    assert all(len(reason) > 15 for reason in known.values())


def test_every_module_that_is_mapped_is_there_and_so_are_tests_for_it() -> None:
    mapped = mapped_tests()
    assert len(mapped) > 20
    for module, tests in mapped.items():
        assert (ROOT / "opdtool" / f"{module}.py").exists(), module
        assert tests, module
        missing = [test for test in tests if not (ROOT / test).is_file()]
        assert not missing, f"{module}: {missing}"


def test_every_module_of_core_and_checks_is_mapped() -> None:
    there = {
        f"{layer}/{path.stem}"
        for layer in ("core", "checks")
        for path in (ROOT / "opdtool" / layer).glob("*.py")
        if path.stem != "__init__"
    }
    assert len(there) > 40
    assert there == set(mapped_tests()) | UNMAPPED


def test_mutants_are_listed_in_the_same_order_every_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = []
    for _ in range(2):
        assert main(["core/metrics", "--list"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "core/metrics.py" in said[0]
