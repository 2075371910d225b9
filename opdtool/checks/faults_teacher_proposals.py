"""What each known fault would have made of the teacher's logits: proposals, with their numbers.

Every search looks at a view: the sample beside what another fault, or none, has made of it. It
proposes what departs from that; the sample and a pass over the whole decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opdtool.checks.faults_teacher_sample import Proposal, View
from opdtool.checks.faults_teacher_search import (
    best_cap,
    best_factor,
    coarser,
    heads_fitting,
    slope,
)
from opdtool.checks.faults_teacher_shifts import (
    column_shifts,
    cp_orders,
    heads_alike,
    likeness,
    position_shifts,
)
from opdtool.checks.teacher_evidence import Ints
from opdtool.core.rebuild import Arrangement, Variant

FULL_ROWS = 3
"""Positions whose whole rows are looked at for padding."""
MOST_UNITS = 256
NEAR_SHIFTS = (1, -1, 2, -2, 3, -3)
"""Shifts of the sequence that are tried beside other faults whatever the sample looks like."""
MOST_ORDERED = 3
"""Teachers of which every order is tried beside other faults."""

Search = Callable[[View], Iterator[Proposal]]
Fits = npt.NDArray[np.bool_]


def _cp_faults(view: View) -> Iterator[Proposal]:
    if view.facts.sharded_by_cp:
        yield from _arrangements(view)
        yield from map(_swapped, cp_orders(view))


def _arrangements(view: View) -> Iterator[Proposal]:
    rest: list[tuple[str, Arrangement, str]] = [
        ("cp-contiguous", "contiguous", "each rank holds one contiguous piece of every sequence")
    ]
    if view.facts.packed and view.facts.units > 1:
        whole = "the whole pack was cut into {} a rank, instead of each sequence"
        rest.append(("cp-split-whole-pack", "pack-zigzag", whole.format("two windows")))
        rest.append(("cp-split-whole-pack", "pack-contiguous", whole.format("one piece")))
    for fault, arrangement, message in rest:
        yield Proposal(fault, Variant(arrangement=arrangement), message)


def _swapped(order: tuple[int, ...]) -> Proposal:
    held = ", ".join(f"rank {r} holds rank {q}'s" for r, q in enumerate(order))
    return Proposal("cp-rank-swapped", Variant(cp_order=order), f"windows swapped: {held}")


def _window_shift(view: View) -> Iterator[Proposal]:
    facts = view.facts
    for shift in column_shifts(view):
        yield Proposal(
            "vocab-window-shifted",
            Variant(column_shift=shift),
            f"column j holds the logit of column j{shift:+d}"
            + _in_ranks(shift, facts.columns, facts.tp_size),
        )
    if facts.draft:
        for shift in column_shifts(view, before_cut=True):
            yield Proposal(
                "vocab-window-shifted",
                Variant(target_shift=shift),
                f"a draft column of target id t holds the logit of id t{shift:+d}"
                + _in_ranks(shift, facts.vocabulary, facts.tp_size),
            )


def _in_ranks(shift: int, columns: int, tp_size: int) -> str:
    local = columns // tp_size
    if tp_size == 1 or columns % tp_size or shift % local:
        return ""
    return f", which is {shift // local:+d} tensor-parallel ranks"


def _transposed(view: View) -> Iterator[Proposal]:
    if view.facts.vocabulary == view.facts.width:
        yield Proposal(
            "head-transposed",
            Variant(transposed=True),
            "the reference is hidden @ weight; it should be hidden @ weight.t()",
        )


def _misrouted(view: View) -> Iterator[Proposal]:
    if len(view.facts.heads) > 1:
        yield from _routed(view, *heads_fitting(view, MOST_UNITS))


def _routed(view: View, units: Ints, fits: Fits) -> Iterator[Proposal]:
    """Routes by which the heads that fit the sampled ``units`` [n] are taken, bool [n, heads]."""
    facts = view.facts
    tags = np.asarray(facts.routes, np.int64)
    for k in np.flatnonzero(fits.all(axis=0)):
        yield from _single(view, facts.heads[int(k)])
    mapping = _mapping(facts.heads, tags[units], fits)
    if mapping is not None and len(set(mapping.values())) == len(mapping):
        yield _mapped(view, mapping)
    if len(units) == facts.units and fits.any(axis=1).all():
        fits = fits[units.argsort()]
        own = np.asarray([facts.heads.index(int(t)) for t in tags])
        taken = np.where(fits[np.arange(facts.units), own], own, fits.argmax(axis=1))
        chosen = tuple(facts.heads[int(k)] for k in taken)
        moved = [u for u in range(facts.units) if chosen[u] != tags[u]]
        if moved and len(set(chosen)) > 1:
            said = ", ".join(f"row {u}: {tags[u]} -> {chosen[u]}" for u in moved[:6])
            more = f" and {len(moved) - 6} more" if len(moved) > 6 else ""
            yield Proposal("teachers-misrouted", Variant(routes=chosen), f"{said}{more}")


def _single(view: View, head: int) -> Iterator[Proposal]:
    if any(tag != head for tag in view.facts.routes):
        yield Proposal(
            "single-head-for-all",
            Variant(routes=(head,) * view.facts.units),
            f"every row went through the head of teacher {head}",
        )


def _mapped(view: View, mapping: Mapping[int, int]) -> Proposal:
    said = ", ".join(f"{tag} -> {head}" for tag, head in sorted(mapping.items()))
    return Proposal(
        "teachers-misrouted",
        Variant(routes=tuple(mapping[tag] for tag in view.facts.routes)),
        f"rows of teacher -> head they went through: {said}",
    )


def _mapping(heads: tuple[int, ...], tags: Ints, fits: Fits) -> dict[int, int] | None:
    """The head that reproduces all sampled rows of each teacher, or None; not the identity."""
    mapping: dict[int, int] = {}
    for tag in sorted({int(t) for t in tags}):
        both = fits[tags == tag].all(axis=0)
        candidates = [heads[int(k)] for k in np.flatnonzero(both)]
        if not candidates:
            return None
        mapping[tag] = tag if tag in candidates else candidates[0]
    return mapping if any(tag != head for tag, head in mapping.items()) else None


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A fault with one number, which departs from the right way in one field of a variant."""

    fault: str
    field: str
    message: str

    def proposals(
        self,
        numbers: Iterable[float],
        eps: Callable[[float], float] = lambda number: 0.0,
        **rest: Any,
    ) -> Iterator[Proposal]:
        """A proposal a number; ``eps`` says what the logits were rounded to before it."""
        for number in numbers:
            changed = {self.field: number, "eps": eps(number), **rest}
            yield Proposal(self.fault, Variant(**changed), self.message.format(number))


_SHIFTED = _Numbered(
    "sequence-shifted", "position_shift", "position p holds the logits of position p{:+d}"
)
_TIMES = _Numbered("logits-scaled", "factor", "the reference is {:.6g} times the rebuilt logits")
_CAP = _Numbered(
    "logits-softcapped",
    "softcap",
    "the reference is cap * tanh(logit / cap) with a cap of {:.6g}",
)


def _sequence_shift(view: View) -> Iterator[Proposal]:
    return _SHIFTED.proposals(position_shifts(view))


def _scaled(view: View) -> Iterator[Proposal]:
    scale = view.facts.scale
    if scale is not None and scale != 1.0 and not view.base.unscaled:
        yield Proposal(
            "logits-scaled",
            Variant(unscaled=True),
            f"the reference was made without the scale of {scale:.6g}: its logits are "
            f"{1 / scale:.6g} times the rebuilt ones"
            + (" before the cap" if view.facts.softcap is not None else ""),
        )
    yield from _TIMES.proposals(
        best_factor(view.made, view.recorded, view.facts.relative),
        lambda factor: coarser(view, factor=factor),
    )


def _capped(view: View) -> Iterator[Proposal]:
    rest: dict[str, Any] = {}
    if view.facts.softcap is not None:
        rest = {"uncapped": True}
        view = View(view.sample, view.base.also(Variant(uncapped=True)))
    yield from _CAP.proposals(
        best_cap(view.made, view.recorded, view.facts.relative),
        lambda cap: coarser(view, cap=cap),
        **rest,
    )


def _log_probs(view: View) -> Iterator[Proposal]:
    facts = view.facts
    away = view.made - view.recorded
    away[~away.isfinite()] = torch.nan
    constant = (away - away.nanmedian(dim=-1, keepdim=True)[0]).abs()
    size = view.made.abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=-1, keepdim=True)
    near = constant <= 4 * view.allowed + (facts.relative + 2 * facts.output_eps) * size
    if not bool((near.sum(dim=-1) > 0.9 * away.isfinite().sum(dim=-1)).any()):
        return
    for over in (False, True) if facts.draft else (False,):
        lse = view.evidence.log_sum_exp(view.spots, view.base, over_vocabulary=over)
        most = max(float(size.max()), float(lse.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        # They were taken of logits that were rounded, as the reference is or the output.
        slack = (facts.relative + facts.output_eps) * most + 2 * float(
            view.allowed.nan_to_num(0.0, 0.0, 0.0).max()
        )
        whole = " over the whole vocabulary" if over else ""
        yield Proposal(
            "log-probs-not-logits",
            Variant(log_probs=True, over_vocabulary=over, slack=slack),
            f"the reference is the rebuilt logits less their log-sum-exp{whole}: log-probabilities",
        )


def _norms(view: View) -> Iterator[Proposal]:
    facts = view.facts
    if facts.normed:
        yield Proposal(
            "norm-applied-twice",
            Variant(norm="none"),
            "the reference is the head of the payload as it is: it was normed already, and "
            "--norm norms it again",
        )
    elif facts.beside:
        normed = _is_normed(view)
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


def _is_normed(view: View) -> bool:
    """Whether hidden states divided by the norm's weight have a root mean square of one."""
    hidden = view.evidence.hidden(view.spots)
    telling = []
    for x, head in zip(hidden, view.sample.right.routes.tolist(), strict=True):
        weight = view.evidence.norm_weight(head)
        some = weight.abs() > 0
        if bool(x.abs().sum() > 0) and bool(some.any()):
            telling.append(float((x[some] / weight[some]).square().mean().sqrt()))
    return bool(telling) and all(abs(rms - 1) < 0.02 for rms in telling)


def _padded(view: View) -> Iterator[Proposal]:
    """The last columns alone hold one value, at every position the same."""
    shared = len(view.every)
    spots = view.worst(FULL_ROWS)
    recorded = view.evidence.recorded(spots, view.every)
    last = recorded[:, -1:]
    constant = ((recorded == last) | (recorded.isnan() & last.isnan())).all(dim=0)
    varying = (~constant).nonzero().flatten()
    first = int(varying[-1]) + 1 if len(varying) else 0
    alike = (last == last[:1]) | (last.isnan() & last[:1].isnan())
    if 0 < first < shared and bool(alike.all()):
        yield Proposal(
            "vocab-padded",
            Variant(columns=first),
            f"columns {first}..{shared - 1} of the reference pad the vocabulary (all "
            f"{float(last[0, 0]):g}); all before them agree",
            leaves_out=True,
        )


SEARCHES: Mapping[str, tuple[Search, ...]] = {
    "cp": (_cp_faults,),
    "columns": (_window_shift, _padded),
    "head": (_transposed, _misrouted),
    "sequence": (_sequence_shift,),
    "scale": (_scaled,),
    "cap": (_capped,),
    "log": (_log_probs,),
    "norm": (_norms,),
}
"""The searches of each axis; faults of one axis are never two at once."""


def _orders_of_ranks(view: View) -> Iterator[Proposal]:
    """Arrangements and orders of ranks: every turn and the reversal, and what looks alike."""
    if not view.facts.sharded_by_cp:
        return
    yield from _arrangements(view)
    size = view.facts.cp_size
    turns = [tuple((r + by) % size for r in range(size)) for by in range(1, size)]
    for order in dict.fromkeys([*cp_orders(view), *turns, tuple(range(size))[::-1]]):
        yield _swapped(order)


def _likely_routes(view: View) -> Iterator[Proposal]:
    """Routes that look alike, and all there are of a few teachers."""
    facts = view.facts
    yield from _transposed(view)
    if len(facts.heads) < 2:
        return
    yield from _routed(view, *heads_alike(view, MOST_UNITS))
    if len(facts.heads) <= MOST_ORDERED:
        for head in facts.heads:
            yield from _single(view, head)
        tags = sorted(set(facts.routes))
        for heads in permutations(facts.heads, len(tags)):
            if list(heads) != tags:
                yield _mapped(view, dict(zip(tags, heads, strict=True)))


def _likely_shifts(view: View) -> Iterator[Proposal]:
    """Shifts that look alike, and the near ones."""
    found = list(dict.fromkeys([*position_shifts(view), *NEAR_SHIFTS]))
    longest = max(view.evidence.length(unit) for unit in range(view.facts.units))
    return _SHIFTED.proposals(shift for shift in found if abs(shift) < longest)


def _likely_factors(view: View) -> Iterator[Proposal]:
    alike = likeness(view.made, view.recorded)
    if float(alike.nanmedian()) > 0.99:
        yield from _TIMES.proposals(slope(view.made, view.recorded, view.facts.relative))


def _columns(view: View) -> Iterator[Proposal]:
    yield from _window_shift(view)
    yield from _padded(view)


OTHERS = tuple(SEARCHES)
FIRSTS: tuple[tuple[str, Search, tuple[str, ...]], ...] = (
    ("columns", _columns, OTHERS),
    ("head", _likely_routes, OTHERS),
    ("sequence", _likely_shifts, OTHERS),
    ("norm", _norms, OTHERS),
    ("cp", _orders_of_ranks, OTHERS),
    ("scale", _likely_factors, ("log",)),
)
"""The first of two faults: how it may be proposed although the other hides it, and the axes on
which the other is then looked for. Those that are no first are found behind any."""
