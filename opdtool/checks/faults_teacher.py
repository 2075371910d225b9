"""Which known fault made the recorded logits: proposed from a sample, screened, then confirmed.

A fault is named only when the whole of what it would have made is what is recorded, within the
tolerance, wherever the fault can be judged. Each search looks at a few positions and proposes;
:func:`diagnose` asks the evidence for the rest. Two faults at once are looked for where no
single one explains everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from opdtool.checks.faults_teacher_proposals import FIRSTS, SEARCHES
from opdtool.checks.faults_teacher_sample import LIKELY, Proposal, Sample, View, agreeing
from opdtool.checks.registry import faults
from opdtool.checks.teacher_evidence import Evidence, Facts
from opdtool.core.rebuild import Variant
from opdtool.findings import Diagnosis

MOST_UNEXPLAINED = 256
LEAST_FOR_PAIR = 32
"""Sampled mismatches that two faults must explain: among all pairs one that happens to fit a
few elements is always found."""
LEAST_FOR_EACH = 4
"""Sampled elements that either of two faults alone must leave unexplained."""
MOST_PADDING = 4
"""One in so many columns may be padding that nothing proves."""
MOST_PASSES = 6
"""Pairs that are tried on the whole."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The faults that the recorded logits show, and what else is to be said of them."""

    diagnosis: tuple[Diagnosis, ...] = ()
    remark: str = ""


def diagnose(evidence: Evidence) -> Verdict:
    """The faults that the recorded logits show, in the registry's order.

    A fault that explains everything is exact, and so are two that do together. Where none does,
    the one that explains most of the mismatches, at least 99 % of them, and adds none, is likely.
    """
    holding = _properties(evidence)
    if evidence.facts.mismatches == 0:
        if not holding and (said := _likely_padding(evidence.facts)):
            likely = replace(_diagnosis({"vocab-padded": said}), match="likely", score=1.0)
            return Verdict((likely,))
        return Verdict(tuple(_diagnosis({name: said}) for name, said in holding.items()))
    sample = Sample(evidence)
    remark = _not_as_asked(sample)
    if remark:  # a cap too high to be felt would explain it, too
        return Verdict(remark=remark)
    scores = _singles(sample)
    best = max((score for score, _ in scores.values()), default=0.0)
    if best < 1.0:
        pairs = tuple(_pairs(sample))
        if pairs:
            return Verdict(pairs)
    named = [name for name in _ordered(scores) if scores[name][0] == best]
    found = {name: scores[name][1] for name in named}
    if best == 1.0 and holding:
        return Verdict(tuple(_diagnosis({n: said} | holding) for n, said in found.items()))
    return Verdict(tuple(_diagnosis({name: said}, best) for name, said in found.items()))


def _singles(sample: Sample) -> dict[str, tuple[float, str]]:
    """The share of the mismatches that each fault explains, and its sentence."""
    scores: dict[str, tuple[float, str]] = {}
    for searches in SEARCHES.values():
        for search in searches:
            for proposal in search(sample.right):
                best = scores.get(proposal.fault, (0.0, ""))[0]
                # A farther shift judges less: it may leave out what a nearer one leaves over.
                enough = best > 0.0 if proposal.shifts else best == 1.0
                if enough or not sample.screens(proposal):
                    continue
                score = _score(sample.evidence, proposal)
                if score > best:
                    scores[proposal.fault] = (score, proposal.message)
    return scores


def _score(evidence: Evidence, proposal: Proposal) -> float:
    """The share of the mismatches that a fault explains; 0 for too little, or if it adds any."""
    mismatches = evidence.facts.mismatches
    bear = 0 if proposal.leaves_out else min(MOST_UNEXPLAINED, int(mismatches * (1 - LIKELY)))
    left = evidence.confirm(proposal.variant, bear)
    if left.count == 0:
        return 1.0
    if left.count > bear:
        return 0.0
    columns = np.unique(left.columns)
    right, allowed = evidence.variant(left.spots, columns, Variant())
    agrees = agreeing(right, evidence.recorded(left.spots, columns), allowed)
    own = torch.from_numpy(np.searchsorted(columns, left.columns))[:, None]
    added = bool(agrees.gather(1, own).any())
    return 0.0 if added else 1 - left.count / mismatches


def _pairs(sample: Sample) -> Iterator[Diagnosis]:
    """Two faults on two axes that together made all that is recorded.

    A pair that judges more of it is meant rather than one that lets more fall off the edges.
    """
    if int(sample.wrong.sum()) < LEAST_FOR_PAIR:
        return
    likely = sorted(_likely_pairs(sample), key=lambda pair: -pair.explained)
    named: set[frozenset[str]] = set()
    most = 0
    for pair in likely[:MOST_PASSES]:
        names = frozenset((pair.first.fault, pair.second.fault))
        if names in named or pair.explained < most:
            continue
        if sample.evidence.confirm(pair.variant, 0).count == 0:
            most = pair.explained
            named.add(names)
            said = {one.fault: one.message for one in (pair.first, pair.second)}
            yield _diagnosis(said)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two faults, what they make together, and how many sampled mismatches that explains."""

    first: Proposal
    second: Proposal
    variant: Variant
    explained: int


def _likely_pairs(sample: Sample) -> Iterator[_Pair]:
    """Pairs that explain the whole sample, where neither of the two does alone."""
    tried: set[Variant] = set()
    for axis, search, others in FIRSTS:
        for first in search(sample.right):
            if first.variant in tried:
                continue
            tried.add(first.variant)
            for second in _beside(View(sample, first.variant), axis, others):
                both = Proposal("", first.variant.also(second.variant), "")
                if both.variant in tried:
                    continue
                tried.add(both.variant)
                if not sample.screens(both, whole=True):
                    continue
                explained = sample.explained(both.variant)
                alone = min(sample.left(one.variant) for one in (first, second))
                if explained >= LEAST_FOR_PAIR and alone >= LEAST_FOR_EACH:
                    yield _Pair(first, second, both.variant, explained)


def _beside(view: View, axis: str, others: tuple[str, ...]) -> Iterator[Proposal]:
    """Faults on other axes than that of the one which made the view."""
    for other in others:
        if other != axis:
            for search in SEARCHES[other]:
                yield from search(view)


def _not_as_asked(sample: Sample) -> str:
    """What to say where the reference is right but for a cap that was asked for."""
    facts = sample.facts
    if facts.softcap is None:
        return ""
    for variant, said in (
        (Variant(uncapped=True), "--logit-softcap"),
        (Variant(uncapped=True, unscaled=True), "--logit-scale and --logit-softcap"),
    ):
        if variant.unscaled and facts.scale is None:
            continue
        proposal = Proposal("", variant, "")
        if sample.screens(proposal, whole=True) and sample.evidence.confirm(variant, 0).count == 0:
            return f"without {said} all of them agree: the reference was made without"
    return ""


def _properties(evidence: Evidence) -> dict[str, str]:
    """Faults that are seen by the shapes, or when every value that both sides have agrees."""
    facts = evidence.facts
    agrees = facts.mismatches == 0
    if facts.uneven:
        values = "agree column by column" if agrees else "are those of the vocabulary"
        return {
            "tp-shards-uneven": f"the shards {values} when they are joined, but are "
            "not equal windows of the vocabulary"
        }
    if facts.reference_columns != facts.columns:
        return _padding(evidence)
    if not agrees:
        return {}
    if facts.coarser and not facts.equal and not facts.given:
        return {
            "rounding-only": f"every difference is what {facts.precision} rounds away; nothing "
            "is wrong"
        }
    return {}


def _padding(evidence: Evidence) -> dict[str, str]:
    """What is to be said of columns that only one side has, where they are padding."""
    facts = evidence.facts
    agrees, wider = facts.mismatches == 0, facts.reference_columns > facts.columns
    if not (wider or agrees) or not evidence.only_padding():
        return {}
    first, last = sorted((facts.columns, facts.reference_columns))
    rest = "; all columns before them agree" if agrees else ""
    if wider:
        return {
            "vocab-padded": f"the reference's columns {first}..{last - 1} pad the vocabulary{rest}"
        }
    return {
        "vocab-padded": f"the head's rows {first}..{last - 1} pad the vocabulary: they are zero, "
        "the reference has no such columns, and all before them agree"
    }


def _likely_padding(facts: Facts) -> str:
    """What is to be said of columns that only one side has, where nothing proves them padding:
    frameworks pad with rows that were never trained, too. More than a few are something else,
    such as one shard of several."""
    if facts.uneven or facts.reference_columns == facts.columns:
        return ""
    first, last = sorted((facts.columns, facts.reference_columns))
    if (last - first) * MOST_PADDING > first:
        return ""
    what = "reference's columns" if facts.reference_columns > facts.columns else "head's rows"
    return (
        f"the {what} {first}..{last - 1}, which the other side lacks, may pad the vocabulary; all "
        "columns before them agree"
    )


def _ordered(names: Iterable[str]) -> list[str]:
    """Names in the registry's order."""
    return sorted(names, key=list(faults()).index)


def _diagnosis(found: dict[str, str], score: float = 1.0) -> Diagnosis:
    """One fault, or two at once, each with its sentence."""
    names = _ordered(found)
    said = "; and ".join(found[name] for name in names)
    fix = " ".join(faults()[name].fix for name in names)
    made = Diagnosis(
        fault=names[0],
        match="exact",
        message=said,
        fix=fix,
        faults=tuple(names) if len(names) > 1 else (),
    )
    return made if score == 1.0 else replace(made, match="likely", score=score)
