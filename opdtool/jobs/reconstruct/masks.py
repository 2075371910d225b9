"""What each slot counts: the masks of a batch or a pack, or what is real."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.masks import draft_token_mask, token_weights
from opdtool.core.offsets import Ints
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.plan import Floats, Plan


def slot_weights(
    plan: Plan, job: ReconstructJob, payload: TensorSource, used: set[str]
) -> tuple[Floats, bool]:
    """The weight of every slot of the layout [T], and whether it is a mask's.

    Slot t counts as much as token t + 1 of its row is trained on (contract 3.3), where the
    masks are there; else every real position counts one.
    """
    with ExitStack() as stack:
        sources = beside(job.batch, job, payload, used, stack)
        token = first_with(sources, "token_mask")
        ready = first_with(sources, "draft_token_mask") if plan.packed else None
        if ready is not None:
            mask = ready.read("draft_token_mask").reshape(-1).to(torch.float64)
            return _filled(plan, mask, "draft_token_mask"), True
        if token is None:
            return _real(plan, plan.lengths), False
        mask = token.read("token_mask").to(torch.float64)
        sample = first_with(sources, "sample_mask")
        factor = None if sample is None else sample.read("sample_mask").reshape(-1)
        rows = plan.rows
        if plan.packed and mask.numel() != plan.layout.total and mask.ndim == 2:
            # The batch's own masks: one row a segment, none for those behind them.
            rows = min(len(mask), plan.layout.num_segments)
        elif plan.packed:
            packed = _filled(plan, mask.reshape(-1), "token_mask")
            if factor is not None and len(factor) == plan.layout.num_segments:
                packed = packed * np.repeat(
                    factor.to(torch.float64).numpy(), plan.layout.padded_lengths
                )
            return _rolled(plan.layout, packed) * _real(plan, plan.lengths), True
        if mask.ndim != 2 or len(mask) != rows:
            raise InputError(
                f"token_mask has shape {list(mask.shape)}, but the payload has {rows} rows of "
                f"{plan.grid.width}; give the masks of the same batch"
            )
        weights = token_weights(mask, None if factor is None else factor.to(torch.float64))
        behind = plan.layout.num_segments - len(weights)
        short = max(0, int(plan.lengths.max(initial=0)) - weights.shape[1])
        weights = torch.nn.functional.pad(weights, (0, short, 0, behind))
        real = PackedLayout.from_cu_seqlens(
            np.concatenate([[0], np.cumsum(plan.lengths)]).astype(np.int64),
            plan.layout.cu_seqlens_padded,
        )
        found: Floats = draft_token_mask(weights, real).numpy()
        return found, True


def beside(
    batch: Sequence[Path],
    job: ReconstructJob,
    payload: TensorSource,
    used: set[str],
    stack: ExitStack,
) -> list[TensorSource]:
    """Where masks and tokens may be: the batch, if one is given, then the payload's own file."""
    if not batch:
        return [payload]
    source = stack.enter_context(open_tensors(list(batch), rename=job.rename, strict_rename=False))
    used.update(source.used_renames)
    return [source, payload]


def first_with(sources: Sequence[TensorSource], name: str) -> TensorSource | None:
    """The first source that holds a tensor, if any does."""
    return next((source for source in sources if name in source), None)


def _filled(plan: Plan, packed: torch.Tensor, name: str) -> Floats:
    out = np.zeros(plan.layout.total)
    if len(packed) > len(out):
        raise InputError(
            f"{name} has {len(packed)} slots, but cu_seqlens_padded ends at {len(out)}"
        )
    out[: len(packed)] = packed.numpy()
    return out


def _rolled(layout: PackedLayout, packed: Floats) -> Floats:
    """Every segment shifted left by one, its last slot zero."""
    out = np.roll(packed, -1)
    ends: Ints = layout.cu_seqlens_padded[1:][layout.padded_lengths > 0] - 1
    out[ends] = 0.0
    return out


def _real(plan: Plan, lengths: Ints) -> Floats:
    slots = np.arange(plan.layout.total)
    unit = np.searchsorted(plan.layout.cu_seqlens_padded, slots, side="right") - 1
    position = slots - plan.layout.cu_seqlens_padded[unit]
    real: Floats = (position < lengths[unit]).astype(np.float64)
    return real
