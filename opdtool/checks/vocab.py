"""What must hold of a draft vocabulary: its map, its t2d, its sizes and its draft head."""

from __future__ import annotations

import torch

from opdtool.checks.vocab_case import DraftCase, draft_places, finding
from opdtool.checks.vocab_fit import FIT_CHECKS
from opdtool.checks.vocab_ids import could_be_ids
from opdtool.core.words import plural
from opdtool.findings import MAX_PLACES, Finding


def check_draft_vocab(case: DraftCase, *, absolute: str = "") -> list[Finding]:
    """Every check of a draft vocabulary, in the order of their codes.

    ``absolute`` is what the diagnosis found to say that d2t holds ids, if anything does.
    """
    checks = (
        _dtype,
        _length,
        lambda case: _offsets(case, absolute),
        _range,
        _unique,
        _order,
        _t2d_dtype,
        _t2d_count,
        _t2d_agreement,
        *FIT_CHECKS,
    )
    return [check(case) for check in checks]


def _dtype(case: DraftCase) -> Finding:
    dtype = str(case.d2t.dtype).removeprefix("torch.")
    if case.d2t.dtype == torch.int64:
        return finding("OPD401", "pass", f"d2t is int64 [{case.entries}]")
    if case.d2t.is_floating_point() or case.d2t.dtype == torch.bool:
        return finding("OPD401", "fail", f"d2t is {dtype}; offsets are integers, int64")
    return finding("OPD401", "warn", f"d2t is {dtype}; tools expect int64")


def _length(case: DraftCase) -> Finding:
    if case.draft_vocab_size is None:
        return finding(
            "OPD402", "skip", "no configured size: no draft_vocab_size in a config.json or option"
        )
    if case.draft_vocab_size == case.entries:
        return finding("OPD402", "pass", f"d2t has the configured {plural(case.entries, 'entry')}")
    return finding(
        "OPD402",
        "fail",
        f"d2t has {plural(case.entries, 'entry')}; draft_vocab_size is {case.draft_vocab_size}",
        mismatches=abs(case.entries - case.draft_vocab_size),
        total=case.draft_vocab_size,
    )


def _offsets(case: DraftCase, absolute: str) -> Finding:
    if case.all_zero:
        return finding(
            "OPD403",
            "fail",
            f"every offset is 0: the draft vocabulary is the target ids 0..{case.entries - 1}",
            mismatches=case.entries,
            total=case.entries,
        )
    if case.arange:
        return finding(
            "OPD403",
            "fail",
            "offset i is i, so that draft id i stands for target id 2i",
            mismatches=case.entries,
            total=case.entries,
        )
    if absolute:
        return finding(
            "OPD403",
            "fail",
            f"d2t holds target ids, not offsets: {absolute}",
            mismatches=case.entries,
            total=case.entries,
        )
    if could_be_ids(case):
        return finding("OPD403", "warn", _doubt(case))
    return finding("OPD403", "pass", "d2t holds offsets")


def _doubt(case: DraftCase) -> str:
    if case.is_map:
        why = f"no two of the {case.entries} target ids are neighbours: right for a map chosen so"
    else:
        why = "read as ids all values are inside and distinct: chance in a map of so few ids"
    return f"{why}, but a d2t that holds ids looks so too (d2t-absolute); give its t2d or --against"


def _range(case: DraftCase) -> Finding:
    wrong = int(case.outside.sum())
    if wrong:
        bound = "negative" if case.targets is None else f"outside 0..{case.targets - 1}"
        i = int(case.outside.nonzero()[0])
        return finding(
            "OPD404",
            "fail",
            f"{wrong} of {case.entries} target ids are {bound}; the first: draft id {i} stands for "
            f"{i} + {int(case.offsets[i])} = {int(case.ids[i])}",
            mismatches=wrong,
            total=case.entries,
            first=draft_places(case, case.outside),
        )
    if case.targets is None:
        return finding(
            "OPD404",
            "skip",
            "no target vocabulary size: give --vocab-size, or a config.json or a t2d beside d2t",
        )
    return finding("OPD404", "pass", f"all target ids lie in 0..{case.targets - 1}")


def _unique(case: DraftCase) -> Finding:
    wrong = int(case.repeated.sum())
    if not wrong:
        return finding("OPD405", "pass", "no two draft ids stand for one target id")
    return finding(
        "OPD405",
        "fail",
        f"{wrong} of {case.entries} draft ids stand for a target id that an earlier one has",
        mismatches=wrong,
        total=case.entries,
        first=draft_places(case, case.repeated),
    )


def _order(case: DraftCase) -> Finding:
    wrong = int(case.descents.sum())
    if not wrong:
        return finding("OPD406", "pass", "target ids ascend")
    if case.t2d is None:
        return finding(
            "OPD406",
            "pass",
            f"target ids do not ascend ({wrong} descents): an order by frequency, which is fine "
            "without a t2d",
        )
    return finding(
        "OPD406",
        "fail",
        f"target ids do not ascend ({wrong} descents) but there is a t2d: logits[..., t2d] gives "
        "ascending ids, so draft classes would be permuted",
        mismatches=wrong,
        total=case.entries,
        first=draft_places(case, case.descents),
    )


def _t2d_dtype(case: DraftCase) -> Finding:
    if case.t2d is None:
        return finding("OPD407", "skip", "no t2d", "t2d")
    dtype = str(case.t2d.dtype).removeprefix("torch.")
    if case.t2d.dtype != torch.bool:
        kind = "an index map" if case.allowed is None else "numbers 0 and 1"
        return finding(
            "OPD407",
            "fail",
            f"t2d is {dtype}, {kind}; a boolean a target id is expected, since logits[..., t2d] "
            "picks columns with booleans and repeats them with numbers",
            "t2d",
        )
    if case.vocab_size is not None and len(case.t2d) != case.vocab_size:
        return finding(
            "OPD407",
            "fail",
            f"t2d has {plural(len(case.t2d), 'entry')}; the target vocabulary has "
            f"{case.vocab_size}",
            "t2d",
        )
    return finding("OPD407", "pass", f"t2d is bool [{len(case.t2d)}]", "t2d")


def _t2d_unreadable(case: DraftCase) -> str | None:
    """Why t2d cannot be compared with d2t."""
    if case.t2d is None:
        return "no t2d"
    return None if case.allowed is not None else "t2d is no boolean map"


def _t2d_count(case: DraftCase) -> Finding:
    why = _t2d_unreadable(case)
    if case.marked is None or why:
        return finding("OPD408", "skip", why or "no t2d", "t2d")
    found = len(case.marked)
    if found == case.entries:
        return finding(
            "OPD408", "pass", f"t2d marks {plural(found, 'id')}, as many as d2t has", "t2d"
        )
    return finding(
        "OPD408",
        "fail",
        f"t2d marks {plural(found, 'id')}; d2t has {case.entries}",
        "t2d",
        mismatches=abs(found - case.entries),
        total=case.entries,
    )


def _t2d_agreement(case: DraftCase) -> Finding:
    why = _t2d_unreadable(case)
    wrong = case.t2d_wrong
    if case.allowed is None or wrong is None or why:
        return finding("OPD409", "skip", why or "no t2d", "t2d")
    stray = int(case.outside.sum())
    if not len(wrong) and not stray:
        return finding("OPD409", "pass", "t2d marks the ids of d2t and no others", "t2d")
    marks = [bool(case.allowed[t]) if t < len(case.allowed) else False for t in wrong.tolist()]
    unmarked = len(marks) - sum(marks)
    return finding(
        "OPD409",
        "fail",
        f"d2t has {plural(unmarked + stray, 'id')} that t2d does not mark, and t2d marks "
        f"{sum(marks)} that "
        "d2t has not",
        "t2d",
        mismatches=len(wrong) + stray,
        total=len(case.allowed),
        first=[
            {"target_id": t, "expected": not mark, "actual": mark}
            for t, mark in zip(wrong[:MAX_PLACES].tolist(), marks, strict=False)
        ],
    )
