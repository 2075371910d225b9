"""Which known fault made the recorded logits: proposed from a sample, screened, then confirmed.

A fault is named only when the whole of what it would have made is what is recorded, within the
tolerance, wherever the fault can be judged. Each search looks at a few positions and proposes;
:func:`diagnose` asks the evidence for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from opdtool.checks.faults_teacher_search import (
    best_cap,
    best_factor,
    column_shifts,
    cp_order,
    head_fits,
    position_shifts,
)
from opdtool.checks.registry import faults
from opdtool.checks.teacher_evidence import Evidence, Ints, Spots
from opdtool.core.rebuild import Arrangement, Variant
from opdtool.findings import Diagnosis

SAMPLE_WRONG, SAMPLE_ANY, SAMPLE_COLUMNS = 16, 16, 384
FULL_ROWS = 3
"""Positions that are looked at over the whole vocabulary."""
MOST_UNITS = 256
LIKELY = 0.99
"""The share of the mismatches that a likely fault explains."""
MOST_UNEXPLAINED = 256


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fault, what it would have made, and the sentence that says so."""

    fault: str
    variant: Variant
    message: str
    leaves_out: bool = False
    """Whether the fault is that the mismatches lie in what is not judged."""


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """The faults that the recorded logits show, in the registry's order.

    A fault that explains everything is exact. Where none does, the one that explains most of
    the mismatches, at least :data:`LIKELY` of them, and adds none, is likely.
    """
    if evidence.facts.mismatches == 0:
        found = _without_mismatch(evidence)
        return tuple(_diagnosis(name, message, 1.0) for name, message in found.items())
    sample = _Sample(evidence)
    scores: dict[str, tuple[float, str]] = {}
    for search in _SEARCHES:
        for proposal in search(sample):
            if scores.get(proposal.fault, (0.0, ""))[0] == 1.0 or not sample.screens(proposal):
                continue
            score = _score(evidence, proposal)
            if score > scores.get(proposal.fault, (0.0, ""))[0]:
                scores[proposal.fault] = (score, proposal.message)
    order = list(faults())
    best = max((score for score, _ in scores.values()), default=0.0)
    named = sorted((n for n, (score, _) in scores.items() if score == best), key=order.index)
    return tuple(_diagnosis(name, scores[name][1], best) for name in named)


def _diagnosis(name: str, message: str, score: float) -> Diagnosis:
    if score == 1.0:
        return Diagnosis(fault=name, match="exact", message=message, fix=faults()[name].fix)
    return Diagnosis(
        fault=name, match="likely", score=score, message=message, fix=faults()[name].fix
    )


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
    recorded = evidence.recorded(left.spots, columns)
    own = torch.from_numpy(np.searchsorted(columns, left.columns))[:, None]
    agrees = ((right - recorded).abs() <= allowed) | (right == recorded)
    added = bool(agrees.gather(1, own).any())
    return 0.0 if added else 1 - left.count / mismatches


def _without_mismatch(evidence: Evidence) -> dict[str, str]:
    """What is still worth saying when every value that both sides have agrees."""
    facts = evidence.facts
    if facts.uneven:
        return {
            "tp-shards-uneven": "the shards agree column by column when they are joined, but are "
            "not equal windows of the vocabulary"
        }
    if facts.reference_columns > facts.columns:
        first, last = facts.columns, facts.reference_columns - 1
        return {
            "vocab-padded": f"the reference's columns {first}..{last} pad the vocabulary; all "
            "columns before them agree"
        }
    if facts.reference_columns < facts.columns:
        first, last = facts.reference_columns, facts.columns - 1
        return {
            "vocab-padded": f"the head's rows {first}..{last} pad the vocabulary: the reference "
            "has no such columns, and all before them agree"
        }
    if facts.coarser and not facts.equal:
        return {
            "rounding-only": f"every difference is what {facts.precision} rounds away; nothing "
            "is wrong"
        }
    return {}


class _Sample:
    """The sampled positions and columns that all proposals are screened on."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.facts = evidence, evidence.facts
        self.spots = evidence.spots(SAMPLE_WRONG, SAMPLE_ANY)
        shared = min(self.facts.columns, self.facts.reference_columns)
        self.every: Ints = np.arange(shared, dtype=np.int64)
        self.columns = self.every
        if shared > SAMPLE_COLUMNS:
            drawn = np.random.default_rng(0).choice(shared, SAMPLE_COLUMNS, replace=False)
            edges = [0, 1, 2, shared - 3, shared - 2, shared - 1]
            wrong = evidence.wrong_columns()
            self.columns = np.unique(np.concatenate([drawn, edges, wrong])).astype(np.int64)
        self.recorded = evidence.recorded(self.spots, self.columns)
        self.right, self.allowed = evidence.variant(self.spots, self.columns, Variant())
        self.wrong = ~((self.right - self.recorded).abs() <= self.allowed)
        self.wrong &= ~(self.right == self.recorded)

    @property
    def routes(self) -> Ints:
        """The head that each spot should go through."""
        routes: Ints = np.asarray(self.facts.routes, np.int64)[self.spots.unit]
        return routes

    def screens(self, proposal: Proposal) -> bool:
        """Whether a fault explains the sample: all that it judges, and mismatches in it."""
        made, allowed = self.evidence.variant(self.spots, self.columns, proposal.variant)
        judged = ~made.isnan()
        agrees = ((made - self.recorded).abs() <= allowed) | (made == self.recorded)
        telling = self.wrong & (~judged if proposal.leaves_out else judged)
        if int(telling.sum()) == 0:
            return False
        if bool((judged & ~self.wrong & ~agrees).any()):
            return False
        left = int((judged & self.wrong & ~agrees).sum())
        return left <= (1 - LIKELY) * int((judged & self.wrong).sum())

    def worst(self, count: int) -> Spots:
        """A few spots, mismatching ones first."""
        return self.spots.take(np.arange(min(count, len(self.spots)), dtype=np.int64))


def _cp_faults(sample: _Sample) -> Iterator[Proposal]:
    facts = sample.facts
    if not facts.sharded_by_cp:
        return
    rest: list[tuple[str, Arrangement, str]] = [
        ("cp-contiguous", "contiguous", "each rank holds one contiguous piece of every sequence")
    ]
    if facts.packed and facts.units > 1:
        whole = "the whole pack was cut into {} a rank, instead of each sequence"
        rest.append(("cp-split-whole-pack", "pack-zigzag", whole.format("two windows")))
        rest.append(("cp-split-whole-pack", "pack-contiguous", whole.format("one piece")))
    for fault, arrangement, message in rest:
        yield Proposal(fault, Variant(arrangement=arrangement), message)
    order = cp_order(sample.evidence, sample.columns)
    if order is not None:
        held = ", ".join(f"rank {r} holds rank {q}'s" for r, q in enumerate(order))
        yield Proposal("cp-rank-swapped", Variant(cp_order=order), f"windows swapped: {held}")


def _window_shift(sample: _Sample) -> Iterator[Proposal]:
    facts = sample.facts
    for shift in column_shifts(sample.evidence, sample.worst(FULL_ROWS), sample.every):
        local = facts.columns // facts.tp_size
        ranks = ""
        if facts.tp_size > 1 and shift % local == 0:
            ranks = f", which is {shift // local:+d} tensor-parallel ranks"
        yield Proposal(
            "vocab-window-shifted",
            Variant(column_shift=shift),
            f"column j holds the logit of column j{shift:+d}{ranks}",
        )


def _transposed(sample: _Sample) -> Iterator[Proposal]:
    if sample.facts.vocabulary == sample.facts.width:
        yield Proposal(
            "head-transposed",
            Variant(transposed=True),
            "the reference is hidden @ weight; it should be hidden @ weight.t()",
        )


def _misrouted(sample: _Sample) -> Iterator[Proposal]:
    facts, evidence = sample.facts, sample.evidence
    if len(facts.heads) < 2:
        return
    spots = evidence.unit_spots(MOST_UNITS)
    fits = head_fits(evidence, spots, sample.columns)  # [units, heads]
    tags = np.asarray(facts.routes, np.int64)
    for k in np.flatnonzero(fits.all(axis=0)):
        head = facts.heads[int(k)]
        if (tags != head).any():
            yield Proposal(
                "single-head-for-all",
                Variant(routes=(head,) * facts.units),
                f"every row went through the head of teacher {head}",
            )
    mapping = _mapping(facts.heads, tags[spots.unit], fits)
    if mapping is not None and len(set(mapping.values())) == len(mapping):
        said = ", ".join(f"{tag} -> {head}" for tag, head in sorted(mapping.items()))
        yield Proposal(
            "teachers-misrouted",
            Variant(routes=tuple(mapping[int(t)] for t in tags)),
            f"rows of teacher -> head they went through: {said}",
        )
    if len(spots) == facts.units and fits.any(axis=1).all():
        own = np.asarray([facts.heads.index(int(t)) for t in tags])
        taken = np.where(fits[spots.unit.argsort()][np.arange(facts.units), own], own, -1)
        first = fits[spots.unit.argsort()].argmax(axis=1)
        chosen = tuple(facts.heads[int(k)] for k in np.where(taken >= 0, taken, first))
        moved = [u for u in range(facts.units) if chosen[u] != tags[u]]
        if moved and len(set(chosen)) > 1:
            said = ", ".join(f"row {u}: {tags[u]} -> {chosen[u]}" for u in moved[:6])
            more = f" and {len(moved) - 6} more" if len(moved) > 6 else ""
            yield Proposal("teachers-misrouted", Variant(routes=chosen), f"{said}{more}")


def _mapping(
    heads: tuple[int, ...], tags: Ints, fits: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> dict[int, int] | None:
    """The head that reproduces all sampled rows of each teacher, or None; not the identity."""
    mapping: dict[int, int] = {}
    for tag in sorted({int(t) for t in tags}):
        both = fits[tags == tag].all(axis=0)
        candidates = [heads[int(k)] for k in np.flatnonzero(both)]
        if not candidates:
            return None
        mapping[tag] = tag if tag in candidates else candidates[0]
    return mapping if any(tag != head for tag, head in mapping.items()) else None


def _sequence_shift(sample: _Sample) -> Iterator[Proposal]:
    for shift in position_shifts(sample.evidence, sample.columns):
        yield Proposal(
            "sequence-shifted",
            Variant(position_shift=shift),
            f"position p holds the logits of position p{shift:+d}",
        )


def _scaled(sample: _Sample) -> Iterator[Proposal]:
    for factor in best_factor(sample.right, sample.recorded):
        yield Proposal(
            "logits-scaled",
            Variant(factor=factor),
            f"the reference is {factor:.6g} times the rebuilt logits",
        )


def _capped(sample: _Sample) -> Iterator[Proposal]:
    for cap in best_cap(sample.right, sample.recorded):
        yield Proposal(
            "logits-softcapped",
            Variant(softcap=cap),
            f"the reference is cap * tanh(logit / cap) with a cap of {cap:.6g}",
        )


def _log_probs(sample: _Sample) -> Iterator[Proposal]:
    facts = sample.facts
    lse = sample.evidence.log_sum_exp(sample.spots)
    finite = sample.right.nan_to_num(0.0, 0.0, 0.0)
    most = max(float(finite.abs().max()), float(lse.abs().max()))
    # The log-sum-exps were taken of logits that were rounded, as the reference is or the output.
    slack = (facts.relative + facts.output_eps) * most + 2 * float(
        sample.allowed.nan_to_num(0.0, 0.0, 0.0).max()
    )
    yield Proposal(
        "log-probs-not-logits",
        Variant(log_probs=True, slack=slack),
        "the reference is the rebuilt logits less their log-sum-exp: log-probabilities",
    )


def _norms(sample: _Sample) -> Iterator[Proposal]:
    facts = sample.facts
    if facts.normed:
        yield Proposal(
            "norm-applied-twice",
            Variant(norm="none"),
            "the reference is the head of the payload as it is: it was normed already, and "
            "--norm norms it again",
        )
    elif facts.beside:
        normed = _is_normed(sample)
        variant = Variant(norm="beside")
        if normed:
            message = "the payload is normed already, and the reference normed it once more"
            yield Proposal("norm-applied-twice", variant, message)
        else:
            message = (
                "the reference is the head of the normed payload: the payload was taken before "
                "the final norm; pass --norm"
            )
            yield Proposal("norm-missing", variant, message)


def _is_normed(sample: _Sample) -> bool:
    """Whether hidden states divided by the norm's weight have a root mean square of one."""
    hidden = sample.evidence.hidden(sample.spots)
    telling = []
    for x, head in zip(hidden, sample.routes.tolist(), strict=True):
        weight = sample.evidence.norm_weight(head)
        some = weight.abs() > 0
        if bool(x.abs().sum() > 0) and bool(some.any()):
            telling.append(float((x[some] / weight[some]).square().mean().sqrt()))
    return bool(telling) and all(abs(rms - 1) < 0.02 for rms in telling)


def _padded(sample: _Sample) -> Iterator[Proposal]:
    """Mismatches in the last columns alone, which hold one value."""
    wrong = sample.wrong.any(dim=0)
    if not bool(wrong.any()) or bool(wrong[0]):
        return
    shared = len(sample.every)
    spots = sample.worst(FULL_ROWS)
    recorded = sample.evidence.recorded(spots, sample.every)
    last = recorded[:, -1:]
    constant = (recorded == last).all(dim=0)
    varying = (~constant).nonzero().flatten()
    first = int(varying[-1]) + 1 if len(varying) else 0
    if 0 < first < shared and bool(torch.equal(last, last[:1].expand_as(last))):
        yield Proposal(
            "vocab-padded",
            Variant(columns=first),
            f"columns {first}..{shared - 1} of the reference pad the vocabulary (all "
            f"{float(last[0, 0]):g}); all before them agree",
            leaves_out=True,
        )


_SEARCHES: tuple[Callable[[_Sample], Iterator[Proposal]], ...] = (
    _cp_faults,
    _window_shift,
    _transposed,
    _misrouted,
    _sequence_shift,
    _scaled,
    _capped,
    _log_probs,
    _norms,
    _padded,
)
