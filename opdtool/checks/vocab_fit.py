"""How a draft vocabulary fits what is around it: ranks, specials, the head, another map."""

from __future__ import annotations

from opdtool.checks.vocab_case import DraftCase, absent, draft_places, finding
from opdtool.core.words import plural
from opdtool.findings import MAX_PLACES, Finding


def _divisible(case: DraftCase) -> Finding:
    rest = case.wanted_size % case.tp
    if case.tp == 1:
        return finding("OPD410", "skip", "no tensor-parallel size above 1 (--tp)")
    if not rest:
        return finding(
            "OPD410",
            "pass",
            f"{case.wanted_size} draft ids are {case.wanted_size // case.tp} a rank",
        )
    return finding(
        "OPD410",
        "fail",
        f"{case.wanted_size} draft ids do not divide by {plural(case.tp, 'rank')}: {rest} left "
        "over, which "
        f"a rounding division drops; the next sizes are {case.wanted_size - rest} and "
        f"{case.wanted_size - rest + case.tp}",
        mismatches=rest,
        total=case.wanted_size,
    )


def _vocab_divisible(case: DraftCase) -> Finding:
    if case.tp == 1 or case.padded is None:
        why = "no --tp above 1" if case.tp == 1 else "no target vocabulary size"
        return finding("OPD411", "skip", why, None)
    rest = case.padded % case.tp
    what = "target ids" if case.padded == case.targets else "target ids with padding"
    if not rest:
        return finding(
            "OPD411", "pass", f"{case.padded} {what} are {case.padded // case.tp} a rank", None
        )
    return finding(
        "OPD411",
        "warn",
        f"{case.padded} {what} do not divide by {plural(case.tp, 'rank')}: {rest} left over; pad "
        "the "
        f"teacher's logits to {plural(case.padded - rest + case.tp, 'column')} before they are cut",
        None,
    )


def _specials(case: DraftCase) -> Finding:
    lost = case.missing_specials
    if lost:
        return finding(
            "OPD412",
            "fail",
            f"required target ids are not in the draft vocabulary: {_listed(lost)}",
            mismatches=len(lost),
            total=len(set(case.must_include)),
            first=[{"target_id": one} for one in lost[:MAX_PLACES]],
        )
    ends = absent(case.end_ids, case.ids)
    if ends:
        return finding(
            "OPD412",
            "warn",
            f"the model's end-of-text ids are not in the draft vocabulary: {_listed(ends)}; a "
            "draft can never end a text",
        )
    if not case.must_include and not case.end_ids:
        return finding("OPD412", "skip", "no required ids (--must-include)")
    return finding("OPD412", "pass", "all required ids are in the draft vocabulary")


def _listed(ids: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ids[:MAX_PLACES]))
    return shown + (f" and {len(ids) - MAX_PLACES} more" if len(ids) > MAX_PLACES else "")


def _head_rows(case: DraftCase) -> Finding:
    if case.head_rows is None:
        return finding("OPD413", "skip", "no draft head to look at", "lm_head.weight")
    if case.head_rows == case.wanted_size:
        return finding(
            "OPD413",
            "pass",
            f"the draft head has {plural(case.head_rows, 'row')}",
            "lm_head.weight",
        )
    return finding(
        "OPD413",
        "fail",
        f"the draft head has {plural(case.head_rows, 'row')}; the draft vocabulary has "
        f"{case.wanted_size}",
        "lm_head.weight",
        mismatches=abs(case.head_rows - case.wanted_size),
        total=case.wanted_size,
    )


def _against(case: DraftCase) -> Finding:
    if case.against is None:
        return finding("OPD414", "skip", "no other map to compare with (--against)")
    if case.equals_against:
        return finding("OPD414", "pass", "d2t is the same as the other map")
    both = min(case.entries, len(case.against))
    wrong = (case.ids[:both] != case.against[:both]).nonzero().squeeze(-1)
    longer = abs(case.entries - len(case.against))
    sizes = f"{case.entries} and {plural(len(case.against), 'entry')}; " if longer else ""
    return finding(
        "OPD414",
        "fail",
        f"{sizes}{len(wrong)} of {both} draft ids stand for another target id than in the other "
        "map",
        mismatches=len(wrong) + longer,
        total=max(case.entries, len(case.against)),
        first=[
            {"draft_id": i, "expected": int(case.against[i]), "actual": int(case.ids[i])}
            for i in wrong[:MAX_PLACES].tolist()
        ],
    )


def _identity(case: DraftCase) -> Finding:
    if case.targets is None:
        return finding("OPD415", "skip", "no target vocabulary size")
    if case.entries != case.targets:
        return finding("OPD415", "skip", "the draft vocabulary is not as large as the target's")
    if bool((case.offsets == 0).all()):
        return finding(
            "OPD415",
            "pass",
            f"identity: the draft has all {case.targets} target ids in their order",
        )
    return finding(
        "OPD415",
        "warn",
        f"the draft has {plural(case.entries, 'id')}, as the target, but not in their order",
    )


def _tokenizer(case: DraftCase) -> Finding:
    if case.tokenizer_size is None:
        return finding("OPD416", "skip", "no tokenizer size (--tokenizer-vocab-size)")
    dead = case.ids >= case.tokenizer_size
    if bool(dead.any()):
        return finding(
            "OPD416",
            "warn",
            f"{int(dead.sum())} draft ids stand for target ids past the tokenizer's "
            f"{case.tokenizer_size}: classes that no token ever is",
            mismatches=int(dead.sum()),
            total=case.entries,
            first=draft_places(case, dead),
        )
    return finding("OPD416", "pass", "every target id is one of the tokenizer's")


FIT_CHECKS = (
    _divisible,
    _vocab_divisible,
    _specials,
    _head_rows,
    _against,
    _identity,
    _tokenizer,
)
