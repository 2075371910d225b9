"""The diagnosis of a comparison: what it asks of the ranks, and how a report says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opdtool.checks.faults_teacher import diagnose
from opdtool.core.divergence import SoftmaxSums
from opdtool.core.offsets import Ints
from opdtool.core.rebuild import RIGHT, Variant
from opdtool.findings import Diagnosis, Report
from opdtool.jobs.reconstruct.engine import run_rank
from opdtool.jobs.reconstruct.evidence import FileEvidence, Left
from opdtool.jobs.reconstruct.files import Files
from opdtool.jobs.reconstruct.merge import Part, compared
from opdtool.jobs.reconstruct.plan import Plan
from opdtool.ranks.launch import Ranks
from opdtool.ranks.topology import Topology


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """The known faults that a reference shows, and what else is to be said of its mismatches."""

    diagnosis: tuple[Diagnosis, ...] = ()
    remark: str = ""

    def said(self, report: Report) -> Report:
        """The report with the remark behind the finding that it explains."""
        if not self.remark:
            return report
        findings = tuple(
            replace(found, message=f"{found.message}; {self.remark}")
            if found.code == "OPD503" and found.status == "fail"
            else found
            for found in report.findings
        )
        return replace(report, findings=findings)


def diagnosed(ranks: Ranks, plan: Plan, parts: Sequence[Part]) -> Diagnosed:
    """What the comparison that the ranks made shows."""
    found = compared(plan, parts)
    if plan.reference is None or found is None:
        return Diagnosed()
    passes = _Passes(ranks, plan, parts)
    with Files(plan) as files:
        evidence = FileEvidence(files, plan, parts, found, passes.confirm)
        verdict = diagnose(evidence)
        return Diagnosed(verdict.diagnosis, verdict.remark)


class _Passes:
    """Passes over the whole, by all ranks together."""

    def __init__(self, ranks: Ranks, plan: Plan, parts: Sequence[Part]) -> None:
        self.ranks, self.plan = ranks, plan
        self._sums: dict[tuple[Variant, bool], dict[int, Tensor]] = {}
        own: dict[int, Tensor] = {}
        for part in parts:
            comparison = part.result.comparison
            if comparison is not None:
                by_slot = own.setdefault(part.cp_rank, torch.zeros(plan.layout.local_total))
                by_slot[torch.from_numpy(part.result.slots)] = comparison.rebuilt.log_sum_exp
        self._sums[RIGHT, False] = own

    def confirm(self, variant: Variant, bear: int) -> Left:
        """What the whole reference holds that is not what a fault would have made."""
        sums: Mapping[int, Tensor] = {}
        if variant.log_probs:
            sums = self.log_sum_exps(variant.summed, variant.over_vocabulary)
        left = self.ranks.run_together(try_ranks, self.plan, variant, sums, bear)
        return sum(count for count, _ in left), [place for _, places in left for place in places]

    def log_sum_exps(self, variant: Variant, over_vocabulary: bool) -> Mapping[int, Tensor]:
        """The log-sum-exp of every slot of each context-parallel rank, [slots], under a variant."""
        key = (variant, over_vocabulary)
        if key not in self._sums:
            plan = replace(self.plan, reference=None, student=None, scored=None)
            if over_vocabulary:
                plan = replace(plan, draft=None, real=plan.vocabulary, columns=plan.vocabulary)
            together: dict[tuple[int, int], tuple[Ints, SoftmaxSums]] = {}
            for results in self.ranks.run_together(sum_ranks, plan, variant):
                for cp_rank, share, slots, sums in results:
                    if (cp_rank, share) in together:
                        together[cp_rank, share][1].merge(sums)
                    else:
                        together[cp_rank, share] = (slots, sums)
            by_rank: dict[int, Tensor] = {}
            for (cp_rank, _), (slots, sums) in together.items():
                by_slot = by_rank.setdefault(cp_rank, torch.zeros(plan.layout.local_total))
                by_slot[torch.from_numpy(slots)] = sums.log_sum_exp
            self._sums[key] = by_rank
        return self._sums[key]


def try_ranks(
    topology: Topology,
    plan: Plan,
    variant: Variant,
    sums: Mapping[int, Tensor],
    bear: int,
) -> Left:
    """What these ranks' reference holds that is not what a fault would have made."""
    count: int = 0
    places: list[tuple[int, int, int]] = []
    with Files(plan) as files:
        for cp_rank in topology.cp_ranks:
            for tp_rank in topology.tp_ranks:
                result = run_rank(
                    files,
                    plan,
                    tp_rank,
                    cp_rank,
                    topology.device,
                    variant=variant,
                    log_sum_exp=sums.get(cp_rank),
                    bear=bear,
                    share=(topology.dp_rank, topology.dp_size),
                )
                assert result.comparison is not None
                count += result.comparison.mismatches
                places += [(cp_rank, p.slot, p.column) for p in result.comparison.first]
                if count > bear:
                    return count, []
    return count, places


def sum_ranks(
    topology: Topology, plan: Plan, variant: Variant
) -> list[tuple[int, int, Ints, SoftmaxSums]]:
    """(context-parallel rank, share, slots, sums) of these ranks' logits under a variant."""
    out = []
    with Files(plan) as files:
        for cp_rank in topology.cp_ranks:
            for tp_rank in topology.tp_ranks:
                result = run_rank(
                    files,
                    plan,
                    tp_rank,
                    cp_rank,
                    topology.device,
                    variant=variant,
                    sums=True,
                    share=(topology.dp_rank, topology.dp_size),
                )
                assert result.softmax is not None
                result.softmax.to_cpu()
                out.append((cp_rank, result.share, result.slots, result.softmax))
    return out
