"""How far the logits of a plan may be from recorded ones, also where a fault made them."""

from __future__ import annotations

from dataclasses import replace

import torch

from opdtool.cli.reconstruct_plan import Plan
from opdtool.core.compare import ErrorBound, derived_bound, given_bound
from opdtool.core.rebuild import Variant


def plan_bound(
    plan: Plan, precision: torch.dtype, rtol: float | None = None, atol: float | None = None
) -> ErrorBound:
    """How far logits recorded in ``precision`` may be from rebuilt ones: derived, or given."""
    if rtol is not None or atol is not None:
        return given_bound(rtol, atol)
    behind = (plan.scale is not None) + 3 * (plan.softcap is not None)
    operand, roundings = operand_rounding(plan)
    return derived_bound(
        width=plan.width,
        reference=precision,
        roundings=1 + behind,
        operand=operand,
        operand_roundings=roundings,
        scale=plan.scale or 1.0,
    )


def operand_rounding(plan: Plan, *, normed: bool | None = None) -> tuple[torch.dtype | None, int]:
    """What the hidden states may be rounded to on the way to the product, and how often.

    A norm rounds here and, once or twice, in the model; so does a cast to a narrower head.
    """
    if plan.kind == "logits":
        return None, 0
    if normed is None:
        normed = any(head.norm is not None for head in plan.heads.values())
    stored, compute = plan.payload.dtype, plan.compute
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
    bound = bound.scaled(variant.factor)
    if variant.softcap is not None:
        bound = replace(bound, relative=2.5 * bound.relative)
    if variant.norm == "beside":
        operand, roundings = operand_rounding(plan, normed=True)
        normed = derived_bound(
            width=plan.width,
            reference=plan.precision or plan.compute,
            operand=operand,
            operand_roundings=roundings,
            scale=plan.scale or 1.0,
        )
        bound = replace(bound, operand=normed.operand)
    return replace(bound, absolute=bound.absolute + variant.slack)
