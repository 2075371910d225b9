"""Mutants of a Python source: small wrong changes that a good test suite must notice.

A mutant changes one place: a comparison at its boundary, an operator, a constant by one, a
condition negated, a refusal left out, a slice's bound dropped. Left alone are things that say
nothing of behaviour: annotations, docstrings, decorators, assertions, ``zip(strict=...)``.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_PAIRS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("new_zeros", "new_ones"),
    ("first", "last"),
)
_SWAPPED = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_TEXTS = {"left": "right", "right": "left"}
_SHOWN = 90

Path = tuple[tuple[str, int | None], ...]
"""From the module's node to a node: the field, and the place in it where it is a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One wrong change of a module's source."""

    function: str
    """The qualified name of the function or class around it; empty at module level."""
    line: int
    change: str
    """What was there, an arrow, what is there now; ``(2)`` marks the second like it."""
    path: Path
    node: ast.AST

    def tree(self, source: str) -> ast.Module:
        """The module with this change."""
        module = ast.parse(source)
        at: ast.AST = module
        for field, index in self.path[:-1]:
            value = getattr(at, field)
            at = value if index is None else value[index]
        field, index = self.path[-1]
        if index is None:
            setattr(at, field, copy.deepcopy(self.node))
        else:
            getattr(at, field)[index] = copy.deepcopy(self.node)
        return ast.fix_missing_locations(module)


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a source, in its order."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for function, path, old, new in _changes(ast.parse(source)):
        line = old.lineno if hasattr(old, "lineno") else 0
        change = f"{_shown(old)} -> {_shown(new)}"
        seen[function, change] += 1
        if seen[function, change] > 1:
            change += f" ({seen[function, change]})"
        ast.copy_location(new, old)
        found.append(Mutant(function=function, line=line, change=change, path=path, node=new))
    return found


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _changes(module: ast.Module) -> Iterator[tuple[str, Path, ast.AST, ast.AST]]:
    """(function, path, node, its replacement) of every mutant."""
    waiting: list[tuple[str, Path, ast.AST]] = [("", (), module)]
    while waiting:
        function, path, node = waiting.pop()
        if path:
            for new in _replacements(node):
                yield function, path, node, new
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            function = f"{function}.{node.name}" if function else node.name
        children = []
        for field, value in _fields(node):
            if isinstance(value, list):
                children += [
                    (function, (*path, (field, i)), child)
                    for i, child in enumerate(value)
                    if isinstance(child, ast.AST)
                ]
            elif isinstance(value, ast.AST):
                children.append((function, (*path, (field, None)), value))
        waiting += reversed([each for each in children if not _left_alone(node, each[2])])


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    skipped = {"annotation", "returns", "decorator_list", "type_comment", "format_spec", "bases"}
    if isinstance(node, ast.Raise):
        skipped |= {"cause"}
    if isinstance(node, ast.ExceptHandler):
        skipped |= {"type"}
    for field, value in ast.iter_fields(node):
        if field not in skipped:
            yield field, value


def _left_alone(parent: ast.AST, node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    # A type alias: names joined by bars, or a subscript of Literal.
    value = node.value if isinstance(node, ast.Assign) and isinstance(parent, ast.Module) else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return isinstance(value.right, (ast.Name, ast.Attribute))
    return isinstance(value, ast.Subscript) and ast.unparse(value.value) in ("Literal", "Callable")


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        yield from _other_comparisons(node)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)):
        yield from _other_operators(node)
        if isinstance(node, ast.AugAssign):
            yield ast.Pass()
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        yield node.operand
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, ast.Slice):
        if node.lower is not None:
            yield ast.Slice(None, node.upper, node.step)
        if node.upper is not None:
            yield ast.Slice(node.lower, None, node.step)
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, (ast.If, ast.While)):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield ast.comprehension(node.target, node.iter, [], node.is_async)
    elif isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()


def _other_comparisons(node: ast.Compare) -> Iterator[ast.AST]:
    for i, op in enumerate(node.ops):
        if type(op) in _COMPARE:
            ops = [*node.ops[:i], _COMPARE[type(op)](), *node.ops[i + 1 :]]
            yield ast.Compare(node.left, ops, node.comparators)


def _other_operators(node: ast.BinOp | ast.AugAssign) -> Iterator[ast.AST]:
    sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    if any(_is_text(side) for side in sides) or type(node.op) not in _OPERATORS:
        return
    op = _OPERATORS[type(node.op)]()
    if isinstance(node, ast.BinOp):
        yield ast.BinOp(node.left, op, node.right)
    else:
        yield ast.AugAssign(node.target, op, node.value)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def _other_constants(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        if value in (1, 2):
            yield ast.Constant(value - 1)
    elif isinstance(value, float):
        yield ast.Constant(value + 1)
    elif isinstance(value, str) and value in _TEXTS:
        yield ast.Constant(_TEXTS[value])


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in _SWAPPED:
        yield ast.Call(ast.Name(_SWAPPED[called.id], ast.Load()), node.args, node.keywords)
    elif isinstance(called, ast.Attribute) and called.attr in _SWAPPED:
        swapped = ast.Attribute(called.value, _SWAPPED[called.attr], ast.Load())
        yield ast.Call(swapped, node.args, node.keywords)
