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
from opdtool.core.words import plural
from opdtool.io.batch import Batch, open_batch
from opdtool.io.places import find_places
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.jobs.reconstruct.find import integers
from opdtool.jobs.reconstruct.job import ReconstructJob
from opdtool.jobs.reconstruct.plan import Floats, Plan

Holder = TensorSource | Batch
"""What masks and tokens are read from: one place, or the rows of several files."""


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
            mask = _finite(ready, "draft_token_mask").reshape(-1)
            return _whole(plan, mask, "draft_token_mask"), True
        sample = first_with(sources, "sample_mask")
        factor = None if sample is None else _finite(sample, "sample_mask").reshape(-1)
        if token is None:
            every = _real(plan, plan.lengths)
            if factor is None:
                return every, False
            return every * np.repeat(_by_segment(plan, factor), plan.layout.padded_lengths), True
        mask = _finite(token, "token_mask")
        if plan.packed and mask.ndim == 2 and mask.shape != (1, plan.layout.total):
            # The batch's own masks: a row for each segment.
            rows = len(mask)
            taken = torch.from_numpy(segment_rows(plan, sources, rows, "token_mask"))
            mask = mask[taken.clamp_min(0)] * (taken >= 0)[:, None]
            if factor is not None:
                if len(factor) != rows:
                    raise InputError(
                        f"sample_mask has {plural(len(factor), 'entry')}, but token_mask "
                        f"{plural(rows, 'row')}; give the masks of one batch"
                    )
                factor = factor[taken.clamp_min(0)]
        elif plan.packed:
            packed = _whole(plan, mask.reshape(-1), "token_mask")
            if factor is not None:
                packed = packed * np.repeat(_by_segment(plan, factor), plan.layout.padded_lengths)
            return _rolled(plan.layout, packed) * _real(plan, plan.lengths), True
        if mask.ndim != 2 or len(mask) != len(plan.lengths):
            raise InputError(
                f"token_mask has shape {list(mask.shape)}, but the payload has "
                f"{plural(plan.rows, 'row')} of "
                f"{plan.grid.width}; give the masks of the same batch"
            )
        weights = token_weights(mask, factor)
        if weights.shape[1] < plan.lengths.max(initial=0):
            row = int(plan.lengths.argmax())
            raise InputError(
                f"token_mask has {plural(weights.shape[1], 'column')}, but row {row} has "
                f"{plan.lengths[row]} tokens; give the masks of the same batch"
            )
        real = PackedLayout.from_cu_seqlens(
            np.concatenate([[0], np.cumsum(plan.lengths)]).astype(np.int64),
            plan.layout.cu_seqlens_padded,
        )
        found: Floats = draft_token_mask(weights, real).numpy()
        return found, True


def segment_rows(plan: Plan, sources: Sequence[Holder], rows: int, name: str) -> Ints:
    """The row of a batch of ``rows`` rows that each unit of the plan is, -1 for a tail.

    ``sequence_index`` says it for the segments of a pack; without one they are rows 0..B-1.

    Raises:
        InputError: the pack has not as many segments, or an index that is no row.
    """
    units = plan.layout.num_segments
    if not plan.packed:
        return np.arange(units, dtype=np.int64)
    tail = int(units > 0 and plan.lengths[-1] == 0)
    index = first_with(sources, "sequence_index")
    if index is None:
        found = np.arange(rows, dtype=np.int64)
        told = f"{plural(rows, 'row')} and there is no sequence_index"
    else:
        found = integers(index, "sequence_index").reshape(-1).numpy()
        told = f"sequence_index has {plural(len(found), 'entry')}"
        outside = np.flatnonzero((found < 0) | (found >= rows))
        if len(outside):
            raise InputError(
                f"sequence_index[{outside[0]}] is {found[outside[0]]}, but {name} has {rows} "
                "rows; give the batch that was packed"
            )
    if len(found) not in (units, units - tail):
        raise InputError(
            f"{name}: {told}, but the pack has {plural(units, 'segment')}; expected one for each"
        )
    return np.append(found, np.full(units - len(found), -1, np.int64))


def beside(
    batch: Sequence[Path],
    job: ReconstructJob,
    payload: TensorSource,
    used: set[str],
    stack: ExitStack,
) -> list[Holder]:
    """Where masks and tokens may be: the batch, if one is given, then the payload's own file.

    Rows count on through several files, unless each holds other tensors of the same rows.
    """
    if not batch:
        return [payload]
    source: Holder
    if _same_tensors(batch, job):
        source = open_batch(batch, rename=job.rename, strict_rename=False)
    else:
        source = open_tensors(batch, rename=job.rename, strict_rename=False)
    stack.enter_context(source)
    used.update(source.used_renames)
    return [source, payload]


def _same_tensors(batch: Sequence[Path], job: ReconstructJob) -> bool:
    """Whether any two of several files hold a tensor of the same name."""
    files = find_places(batch).files
    seen: set[str] = set()
    for path in files if len(files) > 1 else ():
        with open_tensors([path], rename=job.rename, strict_rename=False) as source:
            names = set(source.names())
        if seen & names:
            return True
        seen |= names
    return False


def first_with(sources: Sequence[Holder], name: str) -> Holder | None:
    """The first source that holds a tensor, if any does."""
    return next((source for source in sources if name in source), None)


def _finite(source: Holder, name: str) -> torch.Tensor:
    """A stored mask in float64."""
    mask = source.read(name).to(torch.float64)
    if not bool(mask.isfinite().all()):
        place = [int(at) for at in (~mask.isfinite()).nonzero()[0]]
        raise InputError(
            f"{source.paths[0]}: {name}{place} is {mask[tuple(place)].item()}; a mask holds finite "
            "weights"
        )
    return mask


def _whole(plan: Plan, packed: torch.Tensor, name: str) -> Floats:
    """A mask of all slots of the pack."""
    if len(packed) != plan.layout.total:
        raise InputError(
            f"{name} has {plural(len(packed), 'slot')}, but cu_seqlens_padded ends at "
            f"{plan.layout.total}; give the mask of the whole pack, not of one rank"
        )
    return np.asarray(packed.numpy())


def _by_segment(plan: Plan, factor: torch.Tensor) -> Floats:
    """The weight of every unit, from one for each, or for each but a pack's tail without tokens."""
    units = plan.layout.num_segments
    tail = units - int(plan.packed and units > 0 and plan.lengths[-1] == 0)
    if len(factor) not in (units, tail):
        raise InputError(
            f"sample_mask has {plural(len(factor), 'entry')}; expected one for each of "
            f"{plural(units, 'segment' if plan.packed else 'row')}"
        )
    return np.pad(factor.numpy(), (0, units - len(factor)))


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
