"""The equivalence suite's verdicts: what the ranks made, against the slow statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from opdtool.checks import ranks_reference as slow
from opdtool.checks.ranks import Outputs
from opdtool.checks.ranks_cases import Case, describe
from opdtool.checks.ranks_reference import Array
from opdtool.checks.ranks_verdicts import Verdicts
from opdtool.core import metrics, packing
from opdtool.core.geometry import PackGeometry
from opdtool.core.plan import BinOptions, plan_packs
from opdtool.findings import Scalar

RANKS_AGREE = "OPD714"
ANY_GEOMETRY = "any padding"


def judge(
    verdicts: Verdicts,
    case: Case,
    geometries: Sequence[PackGeometry],
    ranks: Sequence[Sequence[Outputs]],
) -> None:
    """Judge one case; ``ranks[cp_rank][tp_rank]`` are what the ranks made of it."""
    for number, geometry in enumerate(geometries):
        _judge_packs(verdicts, case, geometry, number, ranks)
        _judge_packed_logits(verdicts, case, geometry, number, ranks)
        _judge_metrics(verdicts, case, geometry)
    _judge_logits(verdicts, case, geometries[0], ranks)
    _judge_draft(verdicts, case, geometries[0], ranks)


def judge_agreement(
    verdicts: Verdicts,
    case: Case,
    geometry: PackGeometry,
    simulated: Sequence[Outputs],
    processes: Sequence[Outputs],
) -> None:
    """Hold the digests of everything that processes made equal to the simulated ranks'."""
    for rank, (here, there) in enumerate(zip(simulated, processes, strict=True)):
        for name in here.digests:
            verdicts.same(
                RANKS_AGREE,
                describe_any(geometry),
                {"case": case.name, "rank": rank, "tensor": name},
                np.array([there.digests.get(name, "")], dtype=object),
                np.array([here.digests[name]], dtype=object),
            )


def describe_any(geometry: PackGeometry) -> str:
    """The sizes alone, for what no padding has a part in."""
    return f"TP {geometry.tp_size}, CP {geometry.cp_size}, {ANY_GEOMETRY}"


def _values(tensor: Tensor) -> Array:
    wide = tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
    return wide.numpy()


def _judge_packs(
    verdicts: Verdicts,
    case: Case,
    geometry: PackGeometry,
    number: int,
    ranks: Sequence[Sequence[Outputs]],
) -> None:
    label = describe(geometry)
    cu, cu_padded = slow.offsets(
        case.lengths, geometry.sequence_multiple, geometry.total_multiple, geometry.tail
    )
    ids = case.input_ids.numpy()
    weights = (case.token_mask * case.sample_mask[:, None]).numpy()
    whole = slow.packed(ids, case.lengths, cu_padded, 0)
    targets = slow.packed(ids, case.lengths, cu_padded, -1)
    numbers = np.arange(1, ids.size + 1).reshape(ids.shape)
    tagged = slow.packed(numbers, case.lengths, cu_padded, 0)
    mask = slow.draft_mask(weights, case.lengths, cu_padded)
    ends = np.array([stop - 1 for start, stop in pairwise(cu_padded) if stop > start])
    inner = np.setdiff1d(np.arange(cu_padded[-1]), ends)
    rolled = slow.rolled(tagged, cu_padded)
    owned = np.zeros(ids.size + 1, dtype=np.int64)
    for cp_rank, row in enumerate(ranks):
        made = {
            name.removeprefix(f"{number}."): _values(tensor)
            for name, tensor in row[0].tensors.items()
            if name.startswith(f"{number}.") and not name.endswith("packed-logits")
        }
        at: dict[str, Scalar] = {"case": case.name, "cp_rank": cp_rank}
        slots = slow.shard_slots(cu_padded, cp_rank, geometry.cp_size)
        same = verdicts.same
        same("OPD701", label, at, made["cu_seqlens"], np.array(cu))
        same("OPD701", label, at, made["cu_seqlens_padded"], np.array(cu_padded))
        same("OPD701", label, at, made["whole"], whole)
        same("OPD701", label, at, made["unpacked"], _real_only(ids, case.lengths))
        same("OPD702", label, at, made["ids"], whole[slots])
        same("OPD702", label, at, made["targets"], targets[slots])
        same("OPD704", label, at, made["rolled"][inner], rolled[inner])
        same("OPD705", label, at, made["rolled"][ends], np.zeros(len(ends), dtype=np.int64))
        same("OPD706", label, at, made["whole-mask"], mask)
        same("OPD706", label, at, made["mask"], mask[slots])
        np.add.at(owned, made["numbers"], 1)
    real = np.concatenate([row[:n] for row, n in zip(numbers, case.lengths, strict=True)])
    once = np.zeros_like(owned)
    once[real] = 1
    once[0] = owned[0]  # padding
    verdicts.same("OPD703", label, {"case": case.name}, owned, once)
    _judge_gathered(verdicts, case, geometry, number, ranks, (whole, tagged))


def _judge_gathered(
    verdicts: Verdicts,
    case: Case,
    geometry: PackGeometry,
    number: int,
    ranks: Sequence[Sequence[Outputs]],
    expected: tuple[Array, Array],
) -> None:
    """The core's own gathering, and its own answer to who owns which token."""
    whole, tagged = expected
    label, at = describe(geometry), {"case": case.name}
    layout = geometry.layout(case.lengths)
    shards = [row[0].tensors[f"{number}.ids"] for row in ranks]
    verdicts.same("OPD702", label, {**at}, packing.gather_cp(shards, layout).numpy(), whole)
    owner, local = layout.owners(torch.arange(layout.total))
    held = torch.stack([row[0].tensors[f"{number}.numbers"] for row in ranks])
    verdicts.same("OPD703", label, {**at}, held[owner, local].numpy(), tagged)


def _real_only(rows: Array, lengths: Sequence[int]) -> Array:
    out = np.zeros_like(rows)
    for b, length in enumerate(lengths):
        out[b, :length] = rows[b, :length]
    return out


def _tp_slice(row: Sequence[Outputs], tp_rank: int, columns: int) -> slice:
    shard = columns // len(row)
    return slice(tp_rank * shard, (tp_rank + 1) * shard)


def _each_rank(
    case: Case, ranks: Sequence[Sequence[Outputs]]
) -> Iterator[tuple[dict[str, Scalar], int, int, Outputs]]:
    for cp_rank, row in enumerate(ranks):
        for tp_rank, outputs in enumerate(row):
            at: dict[str, Scalar] = {"case": case.name, "tp_rank": tp_rank, "cp_rank": cp_rank}
            yield at, cp_rank, tp_rank, outputs


def _judge_logits(
    verdicts: Verdicts, case: Case, geometry: PackGeometry, ranks: Sequence[Sequence[Outputs]]
) -> None:
    label, cp_size = describe_any(geometry), geometry.cp_size
    logits = _values(case.logits)
    _, S, V = logits.shape
    hidden, head = _values(case.hidden.to(case.heads[0].dtype)), _values(case.heads[0])
    product = slow.products(hidden, [head], [0] * len(hidden))
    eps = torch.finfo(case.heads[0].dtype).eps
    bound = slow.product_bound(hidden, head, product, eps)
    routed = slow.products(
        _values(case.integers), [_values(h) for h in case.integer_heads], case.teacher
    )
    step = 2 * cp_size if cp_size > 1 else 1
    padding = [(0, 0), (0, -S % step), (0, 0)]
    logits, product, bound = (np.pad(a, padding) for a in (logits, product, bound))
    for at, cp_rank, tp_rank, outputs in _each_rank(case, ranks):
        positions = slow.window(logits.shape[1], cp_rank, cp_size)
        mine = _tp_slice(ranks[0], tp_rank, V)
        made = outputs.tensors
        verdicts.same("OPD707", label, at, _values(made["moved"]), logits[:, positions][..., mine])
        verdicts.near(
            "OPD708",
            label,
            at,
            _values(made["logits"]),
            product[:, positions][..., mine],
            bound[:, positions][..., mine],
        )
        verdicts.same("OPD710", label, at, _values(made["routed"]), routed[..., mine])


def _judge_packed_logits(
    verdicts: Verdicts,
    case: Case,
    geometry: PackGeometry,
    number: int,
    ranks: Sequence[Sequence[Outputs]],
) -> None:
    lengths = case.payload_lengths
    _, cu_padded = slow.offsets(
        lengths, geometry.sequence_multiple, geometry.total_multiple, geometry.tail
    )
    hidden, head = _values(case.hidden.to(case.heads[0].dtype)), _values(case.heads[0])
    product = slow.products(hidden, [head], [0] * len(hidden))
    bound = slow.product_bound(hidden, head, product, torch.finfo(case.heads[0].dtype).eps)
    product, bound = (slow.packed(a, lengths, cu_padded, 0) for a in (product, bound))
    for at, cp_rank, tp_rank, outputs in _each_rank(case, ranks):
        slots = slow.shard_slots(cu_padded, cp_rank, geometry.cp_size)
        mine = _tp_slice(ranks[0], tp_rank, len(head))
        verdicts.near(
            "OPD709",
            describe(geometry),
            at,
            _values(outputs.tensors[f"{number}.packed-logits"]),
            product[slots][:, mine],
            bound[slots][:, mine],
        )


def _judge_draft(
    verdicts: Verdicts, case: Case, geometry: PackGeometry, ranks: Sequence[Sequence[Outputs]]
) -> None:
    label, d2t = describe_any(geometry), case.d2t.tolist()
    V = case.logits.shape[-1]
    drafted = slow.columns(_values(case.logits), d2t)
    gradient = slow.column_gradients(_values(case.draft_weights), d2t, V)
    for at, _, tp_rank, outputs in _each_rank(case, ranks):
        made = outputs.tensors
        verdicts.same(
            "OPD711",
            label,
            at,
            _values(made["drafted"]),
            drafted[..., _tp_slice(ranks[0], tp_rank, len(d2t))],
        )
        verdicts.same(
            "OPD712",
            label,
            at,
            _values(made["gradient"]),
            gradient[..., _tp_slice(ranks[0], tp_rank, V)],
        )


def _judge_metrics(verdicts: Verdicts, case: Case, geometry: PackGeometry) -> None:
    """A loss a token, a reward a sequence and a plain count, of the batch and of its
    microbatches, rescaled and added up."""
    lengths = np.array(case.lengths)
    layout = geometry.layout(case.lengths)
    longest = int(layout.padded_lengths[: len(lengths)].max()) + geometry.total_multiple
    limit = max(longest, layout.total // 3)
    plan = plan_packs(lengths, geometry, BinOptions(max_tokens=limit))
    loss = [float(row[:n].sum()) for row, n in zip(case.token_mask, lengths, strict=True)]
    kinds = {"loss": "tokens", "reward": "sequences", "microbatches": "none"}
    total = {"loss": 0.0, "reward": 0.0, "microbatches": 0.0, "unnamed": 0.0}
    for m in range(plan.microbatches):
        rows = plan.rows(m).tolist()
        tokens = sum(case.lengths[b] for b in rows)
        local = {
            "loss": sum(loss[b] for b in rows) / tokens,
            "reward": sum(b + 1.0 for b in rows) / len(rows),
            "microbatches": 1.0,
            "unnamed": 2.0,
        }
        scaled = metrics.rescale_loss_metrics(
            local,
            kinds,
            token_factor=tokens / sum(case.lengths),
            sequence_factor=len(rows) / case.rows,
        )
        total = {name: total[name] + scaled[name] for name in total}
    expected = {
        "loss": sum(loss) / sum(case.lengths),
        "reward": sum(b + 1.0 for b in range(case.rows)) / case.rows,
        "microbatches": float(plan.microbatches),
        "unnamed": 2.0 * plan.microbatches,
    }
    for name, value in expected.items():
        verdicts.near(
            "OPD713",
            describe(geometry),
            {"case": case.name, "metric": name},
            np.array([total[name]]),
            np.array([value]),
            np.array([1e-12 * abs(value)]),
        )
