"""How far the logits of a plan may be from recorded ones, also where a fault made them."""

from __future__ import annotations

from dataclasses import replace

import torch

from opdtool.core.bounds import ErrorBound, derived_bound, given_bound
from opdtool.core.rebuild import Variant
from opdtool.jobs.reconstruct.plan import Plan


def plan_bound(
    plan: Plan, precision: torch.dtype, rtol: float | None = None, atol: float | None = None
) -> ErrorBound:
    """How far logits recorded in ``precision`` may be from rebuilt ones: derived, or given."""
    if rtol is not None or atol is not None:
        return given_bound(rtol, atol)
    behind = (plan.scale is not None) + 3 * (plan.softcap is not None)
    operand, roundings = operand_rounding(plan)
    bound = derived_bound(
        width=plan.width,
        reference=precision,
        roundings=1 + behind,
        operand=operand,
        operand_roundings=roundings,
        scale=plan.scale or 1.0,
    )
    if plan.reference is not None and plan.reference.dtype == torch.float16:
        # Coarser values in a float16 file still lose what float16 cannot hold near zero.
        least = torch.finfo(torch.float16)
        smallest = least.smallest_normal * least.eps * max(1.0, plan.scale or 1.0)
        bound = replace(bound, absolute=max(bound.absolute, smallest))
    return bound


def summing_order(plan: Plan) -> float:
    """How far apart, in |x| * |w|, two sums in different orders are likely to be: an eighth of
    what the bound allows. Only what they round to in a half precision is looked at with it."""
    return (
        derived_bound(
            width=plan.width, reference=torch.float32, scale=plan.scale or 1.0
        ).accumulation
        / 8
    )


def operand_rounding(plan: Plan, *, normed: bool | None = None) -> tuple[torch.dtype | None, int]:
    """What the hidden states may be rounded to on the way to the product, and how often.

    A norm rounds here and, once or twice, in the model; so does a cast to a narrower head.
    """
    if plan.kind == "logits":
        return None, 0
    if normed is None:
        normed = any(head.norm is not None for head in plan.heads.values())
    stored, compute = plan.payload_precision or plan.payload.dtype, plan.compute
    casts = torch.promote_types(stored, compute) != compute or any(
        torch.promote_types(head.weight.dtype, compute) != compute for head in plan.heads.values()
    )
    eps = [torch.finfo(stored).eps] * normed + [torch.finfo(compute).eps] * casts
    if not eps:
        return None, 0
    widest = stored if normed and torch.finfo(stored).eps == max(eps) else compute
    return widest, 3 * normed + casts


def variant_bound(plan: Plan, variant: Variant) -> ErrorBound:
    """The bound of what a fault would have made.

    A factor scales what the product is off by, a softcap rounds three times more, a norm
    rounds the hidden states. A tolerance that was given stays as it is.
    """
    bound = plan.bound
    assert bound is not None
    if bound.given:
        return bound
    undone = plan.scale if variant.unscaled and plan.scale else 1.0
    bound = bound.scaled(variant.factor / undone)
    if variant.softcap is not None:
        bound = replace(bound, relative=2.5 * bound.relative)
    if variant.norm == "beside":
        operand, roundings = operand_rounding(plan, normed=True)
        normed = derived_bound(
            width=plan.width,
            reference=plan.precision or plan.compute,
            operand=operand,
            operand_roundings=roundings,
            scale=(plan.scale or 1.0) * variant.factor / undone,
        )
        bound = replace(bound, operand=normed.operand)
    if variant.eps:
        bound = replace(bound, relative=max(bound.relative, variant.eps * (1 + 8 * variant.eps)))
    return replace(bound, absolute=bound.absolute + variant.slack)
