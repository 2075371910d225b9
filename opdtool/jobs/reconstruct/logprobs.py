"""Recorded log-probabilities of tokens: which tokens they are of, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opdtool.checks import teacher as checks
from opdtool.core.bounds import EPS, stored_precision
from opdtool.core.errors import InputError
from opdtool.core.offsets import Ints
from opdtool.findings import Finding, Scalar, Table
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.jobs.reconstruct.figures import format_least, format_number, number, rounded_up
from opdtool.jobs.reconstruct.find import integers
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.masks import Holder, beside, first_with, segment_rows
from opdtool.jobs.reconstruct.merge import Part
from opdtool.jobs.reconstruct.plan import Floats, Plan, Scored

Bools = npt.NDArray[np.bool_]
LEFT_OUT = {
    "first_tokens": "first tokens of a sequence, which nothing predicts",
    "padding": "padding",
    "not_recorded": "not trained on and not recorded",
}


def scored_tokens(plan: Plan, job: ReconstructJob, payload: TensorSource, used: set[str]) -> Scored:
    """Recorded log-probabilities beside the tokens they are of, by slot.

    ``logprobs`` is [B, S], entry t scoring token t and entry 0 ignored, or [B, S-1], entry t
    scoring token t + 1: either way the logits of slot t - 1 (or t) predict the token. Of a
    pack it may be [1, T] as well. Every real token but the first of each sequence is scored.
    """
    assert job.logprobs is not None
    if plan.draft is not None:
        raise InputError("--logprobs are over the whole vocabulary; leave out --d2t")
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
        if not _aligned(plan, ids.shape):
            raise InputError(f"input_ids has shape {list(ids.shape)}; expected {_expected(plan)}")
        missing = _missing_entries(plan, ids.shape, info.shape)
        if missing is None or not info.torch_dtype.is_floating_point:
            raise InputError(
                f"{job.logprobs}: logprobs is {info.dtype} {list(info.shape)}; expected floats "
                f"{_expected(plan)} like input_ids {list(ids.shape)}, entry t scoring token t, or "
                "one entry less a row"
            )
        values = source.read("logprobs").to(torch.float64).numpy()
        values = np.pad(values, ((0, 0), (missing, 0)))
        tokens, has_token = _by_slot(plan, ids, sources, "input_ids")
        negative = has_token & (tokens < 0)  # -1 is none, from here on
        if negative.any():
            raise InputError(
                f"input_ids holds token {int(tokens[negative][0])} at a real position; store the "
                "ids that were sampled"
            )
        scores, has_score = _by_slot(plan, values, sources, "logprobs")
        lacking = np.flatnonzero(has_token & ~has_score)
        if len(lacking):
            unit = int(np.searchsorted(plan.layout.cu_seqlens_padded, lacking[0], "right")) - 1
            raise InputError(
                f"{job.logprobs}: logprobs {list(info.shape)} has no entry for some of the "
                f"{plan.lengths[unit]} tokens of sequence {unit}; give the scores of the same rows"
            )
    return _scored(plan, job, info.torch_dtype, tokens, scores, has_token & has_score)


def _in_pack(plan: Plan, shape: tuple[int, ...]) -> bool:
    """Whether a tensor lies in a pack's own slots, [1, T]."""
    return plan.packed and shape == (1, plan.layout.total)


def _aligned(plan: Plan, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be token-aligned: in the pack's slots, or in the rows of a batch."""
    return len(shape) == 2 and (plan.packed or shape[0] == plan.rows)


def _missing_entries(plan: Plan, ids: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """How many entries a row of scores lacks at its beginning, 0 or 1; None where it cannot be
    aligned with the tokens."""
    if not _aligned(plan, shape):
        return None
    if _in_pack(plan, shape):
        return 0
    if _in_pack(plan, ids):  # in rows whose width the tokens do not tell
        return None if shape == (1, plan.layout.total - 1) else 0
    return {ids: 0, (ids[0], ids[1] - 1): 1}.get(shape)


def _expected(plan: Plan) -> str:
    if plan.packed:
        return f"[1, {plan.layout.total}], or [B, S] with a row for each segment,"
    return f"[{plan.rows}, S]"


def _by_slot(
    plan: Plan, values: np.ndarray[Any, Any], sources: Sequence[Holder], name: str
) -> tuple[np.ndarray[Any, Any], Bools]:
    """Values by slot of the whole layout [T], and where there is one."""
    layout = plan.layout
    unit = np.repeat(np.arange(layout.num_segments), layout.padded_lengths)
    slots = np.arange(layout.total)
    position = slots - layout.cu_seqlens_padded[unit]
    real = position < plan.lengths[unit]
    if _in_pack(plan, values.shape):
        return values.reshape(-1), real
    rows = segment_rows(plan, sources, len(values), name)[unit]
    there = real & (position < values.shape[1]) & (rows >= 0)
    out = np.zeros(layout.total, values.dtype)
    out[there] = values[rows[there], position[there]]
    return out, there


def _scored(
    plan: Plan,
    job: ReconstructJob,
    dtype: torch.dtype,
    tokens: Ints,
    scores: Floats,
    there: Bools,
) -> Scored:
    """What each slot's logits predict: the token behind it, where that one is real."""
    starts = np.zeros(len(tokens) + 1, np.bool_)
    starts[plan.layout.cu_seqlens_padded] = True
    predicts = np.append(there[1:], False) & ~starts[1:]
    token = np.where(predicts, np.roll(tokens, -1), -1)
    recorded = np.where(predicts, np.roll(scores, -1), 0.0)
    first_tokens = int((there & starts[:-1]).sum())
    left_out = {"first_tokens": first_tokens, "padding": int((~there).sum()), "not_recorded": 0}
    if plan.masked and plan.weights is not None:
        untrained = predicts & (plan.weights == 0)
        absent = untrained & _filler(recorded, untrained)
        token[absent] = -1
        left_out["not_recorded"] = int(absent.sum())
    outside = predicts & (token != -1) & ((token >= plan.real) | (token < 0))
    if outside.any():
        raise InputError(
            f"input_ids holds token {int(token[outside][0])}, outside the head's vocabulary of "
            f"{plan.real}"
        )
    if not (token >= 0).any():
        raise InputError(f"{job.logprobs}: no token is scored: rows are short, or masked whole")
    kept = torch.from_numpy(recorded[token >= 0]).to(dtype)
    return Scored(
        token=token,
        recorded=recorded,
        dtype=stored_precision(kept),
        left_out=left_out,
    )


def _filler(recorded: Floats, untrained: Bools) -> Bools:
    """Where no log-probability of a token that is not trained on was recorded.

    Engines score what they sample: they leave 0, 1 or NaN for a prompt, or one number for all
    of it. Prompts that were scored are compared like the rest.
    """
    values = recorded[untrained]
    if len(values) > 1 and (values == values[0]).all():
        return np.ones(len(recorded), np.bool_)
    return ~(np.isfinite(recorded) & (recorded < 0))


def compare_scores(plan: Plan, parts: Sequence[Part]) -> tuple[Finding, dict[str, Any]]:
    """Recorded log-probabilities against those of the rebuilt logits."""
    assert plan.scored is not None
    assert plan.score_bound is not None
    found: list[tuple[Ints, Ints, Floats, Floats, Floats]] = []
    for part in parts:
        result, scores = part.result, part.result.scores
        assert scores is not None
        slots = plan.layout.cu_seqlens_padded[result.unit] + result.position
        some = np.flatnonzero(plan.scored.token[slots] >= 0)
        own, allowed = scores.log_probs.numpy()[some], scores.allowed.numpy()[some]
        recorded = plan.scored.recorded[slots[some]]
        found.append((result.unit[some], result.position[some], own, recorded, allowed))
    unit, position, own, recorded, allowed = (
        np.concatenate([one[k] for one in found]) for k in range(5)
    )
    bound = plan.score_bound
    rounded = max(torch.finfo(plan.scored.dtype).eps, EPS)
    if bound.given:
        allowed = bound.absolute + bound.relative * np.abs(recorded)
    else:
        allowed = allowed + rounded * np.abs(recorded)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.nan_to_num(np.abs(own - recorded), nan=np.inf, posinf=np.inf)
        # What is recorded may not be finite, and then what is allowed is not either.
        error = np.where(own == recorded, 0.0, error)
        multiple = np.where(
            error == 0, 0.0, np.nan_to_num(error / allowed, nan=np.inf, posinf=np.inf)
        )
        relative = np.where(
            error == 0, 0.0, np.nan_to_num(error / np.abs(recorded), nan=np.inf, posinf=np.inf)
        )
    wrong = np.flatnonzero(~(multiple <= 1))

    def place(at: int) -> dict[str, Scalar]:
        """The token's own place: that behind the logits which predict it."""
        return {
            "sequence": int(unit[at]),
            "position": int(position[at]) + 1,
            "expected": number(float(own[at])),
            "actual": number(float(recorded[at])),
        }

    order = np.lexsort((position[wrong], unit[wrong]))[:10]
    greatest, worst = int(np.argmax(error)), int(np.argmax(multiple))
    formula = bound.describe() if bound.given else _formula(bound.describe(), rounded)
    finding = checks.logprobs_match(
        "logprobs",
        len(error),
        len(wrong),
        float(error[greatest]),
        [place(at) for at in wrong[order].tolist()],
        formula=formula,
        least=float(multiple[worst]),
    )
    stats = {
        "tokens": len(error),
        "left_out": dict(plan.scored.left_out),
        "mismatches": len(wrong),
        "tolerance": formula,
        "allowed": {
            "median": number(float(np.median(allowed))),
            "max": number(float(np.max(allowed))),
        },
        "max_abs_error": {"value": number(float(error[greatest])), "place": place(greatest)},
        "mean_abs_error": number(float(error.mean())),
        "worst": {
            "multiple": number(float(multiple[worst])),
            "allowed": number(float(allowed[worst])),
            "place": place(worst),
        },
        "least_tolerance": {
            "atol": number(float(error[greatest])),
            "rtol": number(rounded_up(float(relative.max()))),
            "multiple": number(float(multiple[worst])),
        },
    }
    return finding, stats


def _formula(logits: str, rounded: float) -> str:
    _, _, terms = logits.partition(" <= ")
    return (
        f"|a-ref| <= what logits that are off by {terms.replace('|ref|', '|logit|')} "
        f"move it, + {rounded:.4g}*|ref|"
    )


def scores_note(stats: Mapping[str, Any]) -> str:
    """How many tokens were scored, how many not, and why."""
    out = [f"{count:,} {LEFT_OUT[why]}" for why, count in stats["left_out"].items() if count]
    return f"{stats['tokens']:,} log-probabilities are compared" + (
        f"; left out: {', '.join(out)}" if out else ""
    )


def scores_table(stats: Mapping[str, Any]) -> Table:
    """The figures of :func:`compare_scores` in rows."""

    def where(place: Mapping[str, Any]) -> str:
        return f"sequence {place['sequence']}, position {place['position']}"

    greatest, worst, least = stats["max_abs_error"], stats["worst"], stats["least_tolerance"]
    rows = (
        ("tokens compared", f"{stats['tokens']:,}", ""),
        ("greatest error", format_number(greatest["value"]), where(greatest["place"])),
        ("mean error", format_number(stats["mean_abs_error"]), ""),
        ("allowed, median", format_number(stats["allowed"]["median"]), ""),
        ("allowed, greatest", format_number(stats["allowed"]["max"]), ""),
        ("least --atol that would pass", format_least(least["atol"]), "without --rtol"),
        ("least --rtol that would pass", format_least(least["rtol"]), "without --atol"),
        (
            "worst error / its tolerance",
            format_number(least["multiple"]),
            f"passes up to 1; {where(worst['place'])}",
        ),
    )
    return Table(
        title="recorded log-probabilities against rebuilt ones, in nats",
        columns=("figure", "value", "where"),
        rows=rows,
        numeric=frozenset({"value"}),
    )
