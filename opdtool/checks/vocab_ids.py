"""Whether a d2t holds target ids instead of offsets, and how much the evidence is worth.

A map can be read in two ways. As ids its values must be distinct and inside the vocabulary;
as offsets their sums ``i + d2t[i]`` must. Where one reading holds and the other does not, that
is strong, but one wrong entry of a sparse map of offsets looks so too: then order decides,
since maps are written ascending or in an order that is not nearly so. Where both hold, a right
map and a wrong one may be the same numbers, and nothing is said but a warning.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, lgamma, log

import torch
from torch import Tensor

from opdtool.checks.vocab_case import DraftCase, absent
from opdtool.findings import Match

LEAST_SCORE = 0.99
"""A likely fault explains at least this share."""
SUSPICIOUS = 3.0
"""Where so many neighbours are expected, a map without any is worth a warning."""
RARE = 0.05
"""What chance does no more often than this is taken as evidence."""
FEW = 8
"""Of an ascending map at most one entry in so many is taken to be a slip."""


@dataclass(frozen=True, slots=True)
class Absolute:
    """That d2t holds target ids: how sure that is, and by what."""

    match: Match
    score: float
    proof: str


def find_absolute(case: DraftCase) -> Absolute | None:
    """Whether d2t holds ids instead of offsets; never so where it is right as it stands."""
    if not readable_as_ids(case) or proven_offsets(case):
        return None
    proof = _by_other_map(case) or _by_t2d(case)
    if proof is not None or _fits_better_as_offsets(case):
        return proof
    if not case.is_map:
        return None if _slips_in_offsets(case) else Absolute("likely", 1.0, _as_offsets(case))
    if _required_ids_speak_for_ids(case):
        return Absolute("likely", 1.0, "as ids they hold the required ids, as offsets they do not")
    return None


def could_be_ids(case: DraftCase) -> bool:
    """Whether nothing is wrong with d2t as ids, where most maps of offsets could not be so read."""
    if not readable_as_ids(case) or proven_offsets(case) or _fits_better_as_offsets(case):
        return False
    return not case.is_map or expected_neighbours(case) >= SUSPICIOUS


def readable_as_ids(case: DraftCase) -> bool:
    """Whether the values are distinct ids of the vocabulary, and not as well their own offsets."""
    values = case.offsets
    if case.entries < 2 or int(values.min()) < 0:
        return False
    if case.targets is not None and int(values.max()) >= case.targets:
        return False
    return len(torch.unique(values)) == case.entries


def proven_offsets(case: DraftCase) -> bool:
    """Whether t2d or another map says that d2t is right; one that is no map proves nothing."""
    return case.t2d_agrees or (case.equals_against and case.is_map)


def expected_neighbours(case: DraftCase) -> float:
    """How many of D ids among the first M would follow on the one before, chosen at random.

    Offsets are distinct only where no chosen ids are neighbours, ids always are. It is also
    about how many entries of a map of ids leave the vocabulary or collide as offsets.
    """
    return case.entries * case.entries / _reach(case)


def _reach(case: DraftCase) -> int:
    """How many target ids there are, as far as is known."""
    return case.targets or max(int(case.ids.max()) + 1, case.entries)


# ---------------------------------------------------------------- other tensors


def _by_other_map(case: DraftCase) -> Absolute | None:
    if case.against is None:
        return None
    share = _share_equal(case.offsets, case.against)
    if share >= LEAST_SCORE:
        return _proven(share, "they are the target ids of the other map")
    share = _share_among(case.offsets, case.against)
    if share >= LEAST_SCORE and share > _share_among(case.ids, case.against):
        return _proven(share, "they are the target ids of the other map, in another order")
    return None


def _by_t2d(case: DraftCase) -> Absolute | None:
    if case.marked is None:
        return None
    share = _share_among(case.offsets, case.marked)
    if share >= LEAST_SCORE and share > _share_among(case.ids, case.marked):
        return _proven(share, "they are the ids that t2d marks")
    return None


def _proven(share: float, proof: str) -> Absolute:
    return Absolute("exact" if share == 1.0 else "likely", share, proof)


def _fits_better_as_offsets(case: DraftCase) -> bool:
    """Whether t2d or the other map has more of the ids than of the values themselves."""
    against = None if case.equals_against else case.against  # one that is no map proves nothing
    for known in (against, case.marked):
        if known is not None and _share_among(case.ids, known) >= _share_among(case.offsets, known):
            return True
    return False


def _share_equal(mine: Tensor, other: Tensor) -> float:
    """Equal entries over the longer one's length."""
    both = min(len(mine), len(other))
    return int((mine[:both] == other[:both]).sum()) / max(len(mine), len(other))


def _share_among(mine: Tensor, other: Tensor) -> float:
    """Distinct entries that both have, over the longer one's length."""
    mine, other = torch.unique(mine), torch.unique(other)
    return int(torch.isin(mine, other).sum()) / max(len(mine), len(other))


# ---------------------------------------------------------------- the values alone


def _as_offsets(case: DraftCase) -> str:
    outside, repeated = int(case.outside.sum()), int(case.repeated.sum())
    said = [
        f"{count} of them {what}"
        for count, what in ((outside, "leave the vocabulary"), (repeated, "collide"))
        if count
    ]
    return f"as offsets {' and '.join(said)}, as ids all are inside and distinct"


def _slips_in_offsets(case: DraftCase) -> bool:
    """Whether the values are rather a right map of offsets with a few wrong entries in it."""
    wrong = case.outside | case.repeated
    single = int(wrong.sum()) == 1
    if single and case.entries / _reach(case) <= RARE and int(case.ids[wrong]) == case.targets:
        return True  # one past the end, where an id so near it is rare
    as_ids = case.entries - longest_rise(case.offsets)
    if as_ids == 0:
        return False
    as_offsets = case.entries - longest_rise(case.ids[~case.outside])
    few = as_offsets <= max(1, case.entries // FEW)
    # Ids mostly leave the vocabulary too: where they only collide, a slip needs less proof.
    bar = 0.25 if bool(case.outside.any()) else 1.0
    if few and _chance_of_rise(case.entries, as_offsets) <= bar:
        return as_offsets <= 4 * as_ids
    return single and expected_neighbours(case) < RARE


def longest_rise(values: Tensor) -> int:
    """How many entries the longest ascending part has, others left out between them."""
    ends: list[int] = []  # the least end of an ascending part of each length
    for value in values.tolist():
        at = bisect_left(ends, value)
        ends[at : at + 1] = [value]
    return len(ends)


def _chance_of_rise(count: int, missing: int) -> float:
    """At most how probable it is that a random order ascends but for ``missing`` entries."""

    def log_factorial(n: int) -> float:
        return lgamma(n + 1)

    choices = log_factorial(count) - log_factorial(missing) - log_factorial(count - missing)
    return exp(min(0.0, 2 * choices + log_factorial(missing) - log_factorial(count)))


def _required_ids_speak_for_ids(case: DraftCase) -> bool:
    """Whether the values hold all required ids, the sums do not, and chance would not do that."""
    missing = case.missing_specials
    if not missing or absent(case.must_include, case.offsets):
        return False
    share = min(1.0, case.entries / _reach(case))
    return len(missing) * log(share) - expected_neighbours(case) <= log(RARE)
