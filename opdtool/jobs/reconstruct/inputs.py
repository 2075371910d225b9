"""From what was typed to a plan: everything is looked at, and refused, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opdtool.core.bounds import precision_behind
from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Ints, as_offsets
from opdtool.core.rebuild import TokenGrid
from opdtool.core.teacher import check_heads, check_multipliable, check_routes
from opdtool.core.vocab import ids_from_d2t
from opdtool.io.checkpoints import HeadSpec, open_draft
from opdtool.io.tensors import TensorSource, check_renames, open_tensors
from opdtool.jobs.reconstruct.bounds import plan_bound
from opdtool.jobs.reconstruct.find import (
    find_heads,
    find_sharded,
    integers,
    meta,
    naming,
    shard_sizes,
    tensor_at,
)
from opdtool.jobs.reconstruct.masks import scored_tokens, slot_weights
from opdtool.jobs.reconstruct.plan import HeadAt, Plan, Sharded, TensorAt

HIDDEN, LOGITS, INDEX = (
    "teacher_full_hidden_states",
    "teacher_full_logits",
    "opd_full_teacher_index",
)
SAMPLE_TOKENS, SAMPLE_COLUMNS = 16, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconstructJob:
    """All that ``opdtool reconstruct`` was asked to do."""

    payload: Path
    heads: Sequence[HeadSpec] = ()
    norms: Mapping[int, HeadSpec] = field(default_factory=dict)
    norm_eps: float | None = None
    norm_offset: float = 0.0
    output: Path | None = None
    kind: str = "auto"
    tp: int | None = None
    cp: int | None = None
    scale: float | None = None
    softcap: float | None = None
    pad_vocab: int = 1
    student_seq_len: int | None = None
    packed: bool = False
    compute: torch.dtype | None = None
    d2t: Path | None = None
    reference: Sequence[Path] = ()
    student: Sequence[Path] = ()
    logprobs: Path | None = None
    batch: Sequence[Path] = ()
    rtol: float | None = None
    atol: float | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    max_memory: int = 1 << 30
    device: str = "auto"
    ranks: str = "simulated"
    timeout: float = 300.0


def make_plan(job: ReconstructJob) -> Plan:
    """The plan of a job.

    Raises:
        InputError: whatever cannot be right: see the contract's sections 3.6, 4, 5.4 and 6.
    """
    used: set[str] = set()
    _check_options(job)
    with open_tensors([job.payload], rename=job.rename, strict_rename=False) as source:
        kind, payload = _payload(source, job)
        reference = _recorded(job, "reference", used)
        student = _recorded(job, "student", used)
        tp_size, cp_size = shard_sizes(job.tp, job.cp, job.reference, job.student)
        layout, grid, lengths = _layout(source, payload, job, cp_size)
        heads, routes = _heads(source, payload, kind, job, lengths, used)
        first = next(iter(heads.values()), None)
        vocabulary = first.weight.shape[0] if first else payload.shape[2]
        stored = first.weight.dtype if first else payload.dtype
        draft = None if job.d2t is None else _draft(job.d2t, vocabulary, job.rename, used)
        real = vocabulary if draft is None else len(draft)
        padded = draft is None and job.pad_vocab > 1
        plan = Plan(
            kind=kind,
            payload=payload,
            grid=grid,
            layout=layout,
            packed=job.packed,
            rows=payload.shape[0],
            lengths=lengths,
            tp_size=tp_size,
            cp_size=cp_size,
            heads=heads,
            routes=routes,
            vocabulary=vocabulary,
            real=real,
            columns=-(-real // job.pad_vocab) * job.pad_vocab if padded else real,
            draft=draft,
            compute=job.compute or stored,
            scale=job.scale,
            softcap=job.softcap,
            budget=job.max_memory,
        )
        plan = _with_logits(plan, job, reference, student)
        weights, masked = slot_weights(plan, job, source, used)
        plan = replace(plan, weights=weights, masked=masked)
        if job.logprobs is not None:
            bound = plan_bound(plan, plan.compute, job.rtol, job.atol)
            scored = scored_tokens(plan, job, source, used)
            plan = replace(plan, scored=scored, score_bound=bound)
        check_renames(job.rename, source, _Used(used))
    return plan


@dataclass(frozen=True)
class _Used:
    used_renames: set[str]


def _check_options(job: ReconstructJob) -> None:
    if job.compute is not None:
        check_multipliable("--compute-dtype", job.compute)
    for name, value in (("--logit-scale", job.scale), ("--logit-softcap", job.softcap)):
        if value is not None and not (np.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; it must be a finite number above 0")
    for name, value in (("--rtol", job.rtol), ("--atol", job.atol)):
        if value is not None and not (np.isfinite(value) and value >= 0):
            raise InputError(f"{name} is {value}; it must be a finite number of at least 0")
    if not job.reference and (job.rtol is not None or job.atol is not None) and not job.logprobs:
        raise InputError("--rtol and --atol are for a comparison: add --reference or --logprobs")
    if job.packed and job.student_seq_len is not None:
        raise InputError(
            "--student-seq-len is for rows of a batch; a pack's length is in its cu_seqlens_padded"
        )
    if job.norm_eps is not None and not (np.isfinite(job.norm_eps) and job.norm_eps >= 0):
        raise InputError(f"--norm-eps is {job.norm_eps}; it must be a finite number of at least 0")


def _payload(source: TensorSource, job: ReconstructJob) -> tuple[str, TensorAt]:
    there = {
        kind: name
        for kind, name in (("hidden_states", HIDDEN), ("logits", LOGITS))
        if name in source
    }
    kind = job.kind
    if kind == "auto":
        if len(there) == 2:
            raise InputError(
                f"{job.payload} holds both {HIDDEN} and {LOGITS}; "
                "choose with --payload hidden_states or --payload logits"
            )
        kind = next(iter(there), "hidden_states")
    if kind not in there:
        wanted = HIDDEN if kind == "hidden_states" else LOGITS
        listed = ", ".join(source.names()[:8]) or "nothing"
        raise InputError(
            f"{job.payload} holds no {wanted} (there: {listed}); --rename {wanted}=NAME says what "
            "it is called"
        )
    at = tensor_at(source, there[kind])
    if len(at.shape) != 3:
        raise InputError(
            f"{job.payload}: {at.name} has shape {list(at.shape)}; expected [B, S, "
            f"{'H' if kind == 'hidden_states' else 'V'}]"
        )
    check_multipliable(f"{job.payload}: {at.name}", at.dtype)
    if 0 in at.shape:
        raise InputError(f"{job.payload}: {at.name} has shape {list(at.shape)}: nothing to rebuild")
    return kind, at


def _layout(
    source: TensorSource, payload: TensorAt, job: ReconstructJob, cp_size: int
) -> tuple[PackedLayout, TokenGrid, Ints]:
    """How units are cut into ranks, where their tokens are in the payload, and how many."""
    B, S, _ = payload.shape
    if not job.packed:
        multiple = 2 * cp_size if cp_size > 1 else 1
        padded = job.student_seq_len or -(-S // multiple) * multiple
        if padded < S:
            raise InputError(
                f"--student-seq-len is {padded}, but {payload.name} has {S} positions; the "
                "student's sequence must hold the payload"
            )
        if padded % multiple:
            raise InputError(
                f"--student-seq-len is {padded}, no multiple of {multiple} (2 x CP {cp_size}); "
                "a rank holds two equal chunks"
            )
        offsets = np.arange(B + 1, dtype=np.int64) * padded
        layout = PackedLayout.from_cu_seqlens(offsets, offsets, cp_size=cp_size)
        return layout, TokenGrid(width=S), _lengths(source, B, S)
    if B != 1:
        raise InputError(
            f"{payload.name} has {B} rows; --packed is for a payload [1, T, H]: leave it out"
        )
    if "cu_seqlens_padded" not in source:
        raise InputError(f"{job.payload} holds no cu_seqlens_padded, which --packed needs")
    offsets = as_offsets(integers(source, "cu_seqlens_padded"))
    with naming(job.payload, "cu_seqlens_padded"):
        layout = PackedLayout.from_cu_seqlens(offsets, offsets, cp_size=cp_size)
    if layout.total != S:
        raise InputError(
            f"{job.payload}: cu_seqlens_padded ends at {layout.total}, but {payload.name} has {S} "
            "slots; the offsets must be those of this pack"
        )
    lengths = layout.padded_lengths
    if "cu_seqlens" in source:
        given = np.diff(as_offsets(integers(source, "cu_seqlens")))
        if len(given) == len(lengths):
            lengths = np.clip(given, 0, lengths)
    return layout, TokenGrid(width=S, offsets=offsets), lengths


def _lengths(source: TensorSource, B: int, S: int) -> Ints:
    if "input_lengths" not in source:
        return np.full(B, S, np.int64)
    lengths = as_offsets(integers(source, "input_lengths").reshape(-1))
    if len(lengths) != B or not ((lengths >= 0) & (lengths <= S)).all():
        raise InputError(
            f"input_lengths has {len(lengths)} entries up to {int(lengths.max(initial=0))}, but "
            f"the payload is {B} rows of {S}; expected one length in 0..{S} a row"
        )
    return lengths


def _heads(
    source: TensorSource,
    payload: TensorAt,
    kind: str,
    job: ReconstructJob,
    lengths: Ints,
    used: set[str],
) -> tuple[dict[int, HeadAt], Ints]:
    """The heads, and the teacher of every unit (of any, for logits: none is asked)."""
    units = len(lengths)
    if kind == "logits":
        if job.norms:
            raise InputError("--norm is for hidden states, but the payload is logits")
        return {}, np.zeros(units, np.int64)
    if not job.heads:
        raise InputError(
            f"{job.payload} holds hidden states: pass the teacher's output layer as "
            "--head [INDEX=]PATH[:KEY]"
        )
    heads = find_heads(
        job.heads, job.norms, eps=job.norm_eps, offset=job.norm_offset, rename=job.rename, used=used
    )
    for head in heads.values():
        if 0 in head.weight.shape:
            raise InputError(
                f"{head.weight.path}: {head.weight.name} has shape {list(head.weight.shape)}: "
                "nothing to rebuild"
            )
    if job.compute is not None:  # then it does not matter what they are stored in
        with naming(*(head.weight.path for head in heads.values())):
            wanted = {i: meta(h.weight).to(job.compute) for i, h in heads.items()}
            check_heads(payload.shape[2], wanted)
            for index, head in heads.items():
                check_multipliable(f"the head of teacher {index}", head.weight.dtype)
    else:
        with naming(*(head.weight.path for head in heads.values())):
            check_heads(payload.shape[2], {i: meta(h.weight) for i, h in heads.items()})
    for head in heads.values():
        if head.norm is not None and head.norm.weight.shape != (payload.shape[2],):
            raise InputError(
                f"{head.norm.weight.path}: the norm of teacher {head.index} has shape "
                f"{list(head.norm.weight.shape)}, but "
                f"the payload's width is {payload.shape[2]}"
            )
    word = "segment" if job.packed else "row"
    if INDEX not in source:
        if len(heads) > 1:
            raise InputError(
                f"{len(heads)} heads are given, but {job.payload} holds no {INDEX} to say which "
                f"{word} is whose"
            )
        return heads, np.full(units, next(iter(heads)), np.int64)
    tagged = integers(source, INDEX)
    if tagged.ndim > 1 and tagged.shape != (units, 1):
        raise InputError(
            f"{job.payload}: {INDEX} has shape {list(tagged.shape)}; expected [{units}], one entry "
            f"a {word}"
        )
    tags = tagged.reshape(-1).tolist()
    if job.packed and tags and len(tags) == units - 1 and lengths[-1] == 0:
        tags.append(tags[0])  # a tail segment holds no tokens: any head will do
    if len(tags) != units:
        raise InputError(
            f"{job.payload}: {INDEX} has {len(tags)} entries for {units} {word}s; expected one a "
            f"{word}"
        )
    with naming(job.payload):
        check_routes(tags, heads, word=word)
    return heads, np.asarray(tags, np.int64)


def _draft(path: Path, vocabulary: int, rename: Mapping[str, str], used: set[str]) -> Ints:
    mine = {name: theirs for name, theirs in rename.items() if name == "d2t"}
    found = open_draft(path, rename=mine)
    used.update(mine)
    if found.d2t is None:
        raise InputError(f"--d2t {path} holds no d2t")
    if found.d2t.numel() == 0:
        raise InputError(f"--d2t {path}: d2t is empty: nothing to rebuild")
    try:
        ids = ids_from_d2t(found.d2t, vocabulary)
    except InputError as error:
        raise InputError(f"--d2t {path}: {error}") from error
    return as_offsets(ids)


def _recorded(job: ReconstructJob, what: str, used: set[str]) -> Sharded | None:
    paths = job.reference if what == "reference" else job.student
    if not paths:
        return None
    names = (LOGITS, "teacher_logits") if what == "reference" else ("student_logits",)
    return find_sharded(paths, f"--{what}", names, job.rename, used)


def _with_logits(
    plan: Plan, job: ReconstructJob, reference: Sharded | None, student: Sharded | None
) -> Plan:
    """The plan with its reference and student, once their shapes are known to fit."""
    for side in (reference, student):
        if side is not None:
            _check_positions(plan, side)
    if reference is not None:
        if plan.draft is not None and reference.width != plan.real:
            reference = replace(reference, gathered=True)
            _check_gathered(plan, reference)
        plan = replace(plan, reference=reference)
        precision = _precision(plan, reference)
        plan = replace(
            plan, precision=precision, bound=plan_bound(plan, precision, job.rtol, job.atol)
        )
    if student is not None:
        if plan.draft is not None and student.width != plan.real:
            student = replace(student, gathered=True)
            _check_gathered(plan, student)
        elif student.width not in (plan.real, plan.columns) or student.uneven:
            raise InputError(
                f"--student has {student.width} columns, but {plan.real} are rebuilt; "
                "divergences need the same vocabulary on both sides"
            )
        plan = replace(plan, student=student)
    if not plan.own_windows and plan.columns % plan.tp_size:
        name = "vocabulary" if plan.draft is None else f"draft vocabulary of --d2t {job.d2t}"
        advice = (
            "pad it with --pad-vocab-to-multiple-of"
            if plan.draft is None
            else f"take a --tp that divides {plan.columns}, or build a map of a multiple of "
            f"{plan.tp_size}"
        )
        raise InputError(
            f"the {name} of {plan.columns} columns is not divisible by TP {plan.tp_size} "
            f"(remainder {plan.columns % plan.tp_size}); {advice}"
        )
    if job.output is not None and plan.own_windows:
        raise InputError(
            "the shards of --reference are cut otherwise than evenly; check them without -o first"
        )
    return plan


def _check_positions(plan: Plan, side: Sharded) -> None:
    at = side.files[0, 0]
    rows, width, _ = at.shape
    padded = plan.layout.total // plan.rows
    if side.cp_size > 1:
        least = most = padded // plan.cp_size
    else:
        least, most = plan.grid.width, padded
    if rows != plan.rows or not least <= width <= most:
        raise InputError(
            f"{side.what} {at.path}: {at.name} has shape {list(at.shape)}, but "
            f"[{plan.rows}, {least}, ...] is rebuilt{' a rank' if side.cp_size > 1 else ''}; "
            "give the logits of the same rows and positions (--student-seq-len, --packed?)"
        )


def _check_gathered(plan: Plan, side: Sharded) -> None:
    if side.width < plan.vocabulary:
        raise InputError(
            f"{side.what} has {side.width} columns; expected the {plan.real} draft columns or the "
            f"whole vocabulary of {plan.vocabulary}"
        )


def _precision(plan: Plan, reference: Sharded) -> torch.dtype:
    """What the reference's values hold, or were made of, from a few tokens."""
    at = reference.files[0, 0]
    if at.dtype == torch.bfloat16:
        return at.dtype
    B, S, V = at.shape
    with open_tensors([at.path]) as source:
        rows = [0] if B == 1 else [0, B // 2, B - 1]
        parts: list[Tensor] = []
        for row in sorted(set(rows)):
            for s in sorted({0, S // 3, S // 2, max(0, S - 2)}):
                box = (slice(row, row + 1), slice(s, s + 1), slice(0, min(V, SAMPLE_COLUMNS)))
                parts.append(source.read(at.name, *box).flatten())
    return precision_behind(torch.cat(parts), scale=plan.scale, softcap=plan.softcap)
