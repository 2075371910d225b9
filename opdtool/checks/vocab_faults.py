"""Which known mistakes a draft vocabulary has, the root cause first.

Most faults of a map are properties: they are exact where they hold. That offsets were written
as ids is exact only where t2d or another map proves it (contract 7).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from opdtool.checks.registry import faults
from opdtool.checks.vocab import check_draft_vocab
from opdtool.checks.vocab_case import DraftCase
from opdtool.checks.vocab_ids import Absolute, find_absolute
from opdtool.core.words import plural
from opdtool.findings import Diagnosis, Finding


def judge_draft_vocab(case: DraftCase) -> tuple[list[Finding], list[Diagnosis]]:
    """The findings of every check, and the faults that explain those that fail."""
    absolute = find_absolute(case)
    proof = absolute.proof if absolute else ""
    return check_draft_vocab(case, absolute=proof), diagnose(case, absolute)


def diagnose(case: DraftCase, absolute: Absolute | None) -> list[Diagnosis]:
    """Every known fault that holds, in the order of their causes."""
    found: list[Diagnosis] = []
    for name, holds in _FAULTS.items():
        if name == "d2t-absolute":
            if absolute is not None:
                found.append(_absolute_entry(absolute))
            continue
        message = holds(case)
        if message:
            found.append(
                Diagnosis(fault=name, match="exact", message=message, fix=faults()[name].fix)
            )
    return found


def _absolute_entry(absolute: Absolute) -> Diagnosis:
    sure = absolute.match == "exact"
    return Diagnosis(
        fault="d2t-absolute",
        match=absolute.match,
        message=f"d2t holds target ids instead of offsets: {absolute.proof}",
        fix=faults()["d2t-absolute"].fix,
        score=None if sure else absolute.score,
    )


def _arange(case: DraftCase) -> str:
    return "d2t is 0, 1, 2, ...: draft id i stands for target id 2i" if case.arange else ""


def _all_zero(case: DraftCase) -> str:
    said = f"d2t is all zero: the draft vocabulary is the first {case.entries} target ids"
    return said if case.all_zero else ""


def _length(case: DraftCase) -> str:
    if case.draft_vocab_size is None or case.draft_vocab_size == case.entries:
        return ""
    return f"d2t has {plural(case.entries, 'entry')} where {case.draft_vocab_size} are configured"


def _out_of_range(case: DraftCase) -> str:
    wrong = int(case.outside.sum())
    return f"{wrong} of {case.entries} target ids lie outside the vocabulary" if wrong else ""


def _duplicates(case: DraftCase) -> str:
    wrong = int(case.repeated.sum())
    return f"{wrong} draft ids share their target id with an earlier one" if wrong else ""


def _t2d_not_boolean(case: DraftCase) -> str:
    if case.t2d is None or case.t2d.dtype == torch.bool:
        return ""
    return f"t2d is {str(case.t2d.dtype).removeprefix('torch.')}, not boolean"


def _t2d_mismatch(case: DraftCase) -> str:
    if case.t2d is None:
        return ""
    if case.t2d.dtype == torch.bool and case.targets is not None and len(case.t2d) != case.targets:
        return f"t2d speaks of {len(case.t2d)} target ids, the vocabulary has {case.targets}"
    if case.allowed is None or case.t2d_agrees:
        return ""
    return "t2d does not mark exactly the target ids of d2t"


def _order(case: DraftCase) -> str:
    if case.t2d is None or not bool(case.descents.any()):
        return ""
    return "target ids do not ascend although there is a t2d"


def _not_divisible(case: DraftCase) -> str:
    rest = case.wanted_size % case.tp
    return (
        f"{case.wanted_size} draft ids over {plural(case.tp, 'rank')} leave {rest}" if rest else ""
    )


def _specials(case: DraftCase) -> str:
    lost = len(case.missing_specials)
    return f"{lost} required target ids are not in the draft vocabulary" if lost else ""


def _head_rows(case: DraftCase) -> str:
    if case.head_rows is None or case.head_rows == case.wanted_size:
        return ""
    return f"the draft head has {plural(case.head_rows, 'row')} for {case.wanted_size} draft ids"


def _stale(case: DraftCase) -> str:
    if case.against is None or case.equals_against:
        return ""
    return "d2t differs from the map that it should equal"


# What a map is made of comes before what follows from it: a map of ids is also out of range,
# disagrees with its t2d and differs from the right map.
_FAULTS: dict[str, Callable[[DraftCase], str]] = {
    "d2t-arange": _arange,
    "d2t-absolute": lambda case: "",
    "d2t-all-zero": _all_zero,
    "d2t-length": _length,
    "d2t-out-of-range": _out_of_range,
    "d2t-duplicate-targets": _duplicates,
    "t2d-not-boolean": _t2d_not_boolean,
    "t2d-mismatch": _t2d_mismatch,
    "d2t-order-with-t2d": _order,
    "d2t-not-divisible": _not_divisible,
    "special-token-missing": _specials,
    "draft-head-rows": _head_rows,
    "stale-map": _stale,
}
