"""Recorded log-probabilities of tokens: which tokens they are of, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from opdtool.checks import teacher as checks
from opdtool.core.bounds import EPS
from opdtool.core.errors import InputError
from opdtool.core.offsets import Ints
from opdtool.findings import Finding
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.jobs.reconstruct.figures import number
from opdtool.jobs.reconstruct.find import integers
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.masks import beside, first_with
from opdtool.jobs.reconstruct.merge import Part
from opdtool.jobs.reconstruct.plan import Floats, Plan, Scored


def scored_tokens(plan: Plan, job: ReconstructJob, payload: TensorSource, used: set[str]) -> Scored:
    """Recorded log-probabilities beside the tokens they are of, by slot.

    ``logprobs`` is [B, S], entry t scoring token t and entry 0 ignored, or [B, S-1], entry t
    scoring token t + 1: either way the logits of slot t - 1 (or t) predict the token.
    """
    assert job.logprobs is not None
    if plan.draft is not None:
        raise InputError("--logprobs are over the whole vocabulary; leave out --d2t")
    if plan.packed:
        raise InputError("--logprobs is for a batch [B, S]; leave out --packed")
    with ExitStack() as stack:
        source = stack.enter_context(
            open_tensors([job.logprobs], rename=job.rename, strict_rename=False)
        )
        used.update(source.used_renames)
        info = source.require("logprobs")
        sources = [source, *beside(job.batch, job, payload, used, stack)]
        ids_in = first_with(sources, "input_ids")
        if ids_in is None:
            raise InputError(
                f"neither {job.logprobs} nor {job.payload} holds input_ids, the tokens that were "
                "scored; add --batch BATCH"
            )
        ids = integers(ids_in, "input_ids").numpy()
        B, S = plan.rows, ids.shape[1] if ids.ndim == 2 else -1
        if ids.ndim != 2 or len(ids) != B:
            raise InputError(f"input_ids has shape {list(ids.shape)}; expected [{B}, S]")
        if info.shape not in ((B, S), (B, S - 1)) or not info.torch_dtype.is_floating_point:
            raise InputError(
                f"{job.logprobs}: logprobs is {info.dtype} {list(info.shape)}; expected floats "
                f"[{B}, {S}], entry t scoring token t, or [{B}, {S - 1}]"
            )
        values = source.read("logprobs").to(torch.float64).numpy()
    values = values[:, 1:] if values.shape[1] == S else values
    token = np.full(plan.layout.total, -1, np.int64)
    recorded = np.zeros(plan.layout.total)
    for b in range(B):
        count = max(0, min(int(plan.lengths[b]), S) - 1)
        at = slice(int(plan.layout.cu_seqlens_padded[b]), None)
        token[at][:count] = ids[b, 1 : 1 + count]
        recorded[at][:count] = values[b, :count]
    if plan.masked and plan.weights is not None:
        # Prompts are not sampled: what is recorded for them is anything.
        token[plan.weights == 0] = -1
    outside = (token >= plan.real) | (token < -1)
    if outside.any():
        raise InputError(
            f"input_ids holds token {int(token[outside][0])}, outside the head's vocabulary of "
            f"{plan.real}"
        )
    if not (token >= 0).any():
        raise InputError(f"{job.logprobs}: no token is scored: rows are short, or masked whole")
    return Scored(token=token, recorded=recorded, dtype=info.torch_dtype)


def compare_scores(plan: Plan, parts: Sequence[Part]) -> tuple[Finding, dict[str, Any]]:
    """Recorded log-probabilities against those of the rebuilt logits."""
    assert plan.scored is not None
    found: list[tuple[Ints, Ints, Floats, Floats, Floats]] = []
    for part in parts:
        result = part.result
        assert result.softmax is not None
        assert result.token_logits is not None
        slots = plan.layout.cu_seqlens_padded[result.unit] + result.position
        some = np.flatnonzero(plan.scored.token[slots] >= 0)
        lse = result.softmax.log_sum_exp.to(torch.float64).numpy()
        own = result.token_logits.to(torch.float64).numpy() - lse
        bound = _score_bound(plan, part)
        found.append(
            (
                result.unit[some],
                result.position[some],
                own[some],
                plan.scored.recorded[slots[some]],
                bound[some],
            )
        )
    unit, position, own, recorded, bound = (
        np.concatenate([one[k] for one in found]) for k in range(5)
    )
    assert plan.score_bound is not None
    if plan.score_bound.given:
        allowed = plan.score_bound.absolute + plan.score_bound.relative * np.abs(recorded)
    else:
        eps = max(torch.finfo(plan.scored.dtype).eps, EPS)
        allowed = bound + 4 * eps * (np.abs(recorded) + 1)
    error = np.abs(own - recorded)
    with np.errstate(invalid="ignore"):
        error = np.where(own == recorded, 0.0, np.nan_to_num(error, nan=np.inf, posinf=np.inf))
    # What is recorded may not be finite, and then what is allowed is not either.
    right = (error == 0) | (np.isfinite(error) & (error <= allowed))
    wrong = np.flatnonzero(~right)
    order = np.lexsort((position[wrong], unit[wrong]))[:10]
    first = [
        {
            "sequence": int(unit[i]),
            "position": int(position[i]) + 1,
            "expected": number(float(own[i])),
            "actual": number(float(recorded[i])),
        }
        for i in wrong[order].tolist()
    ]
    worst = int(np.argmax(error))
    finding = checks.logprobs_match("logprobs", len(error), len(wrong), float(error[worst]), first)
    stats = {
        "tokens": len(error),
        "mismatches": len(wrong),
        "max_abs_error": {
            "value": number(float(error[worst])),
            "place": {"sequence": int(unit[worst]), "position": int(position[worst]) + 1},
        },
        "mean_abs_error": number(float(error.mean())),
        "least_tolerance": {"atol": number(float(error.max()))},
    }
    return finding, stats


def _score_bound(plan: Plan, part: Part) -> Floats:
    """How far a log-probability may be off at each position: twice what a logit may be.

    A log-sum-exp moves by no more than the most that any of its logits does.
    """
    result, bound = part.result, plan.score_bound
    assert bound is not None
    most = max(abs(result.extent.low), abs(result.extent.high))
    rows = result.row_norms.to(torch.float64).numpy()
    columns = result.greatest_norms
    product = bound.accumulation * columns[0] * rows[0] + bound.operand * columns[1] * rows[1]
    found: Floats = 2 * (bound.relative * most + product + bound.absolute)
    return found
