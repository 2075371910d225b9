"""From what was typed to a plan: everything is looked at, and refused, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import Ints, as_offsets
from opdtool.core.rebuild import TokenGrid
from opdtool.core.teacher import check_heads, check_multipliable, check_routes
from opdtool.core.vocab import ids_from_d2t
from opdtool.core.words import plural
from opdtool.io.batch import Batch
from opdtool.io.checkpoints import open_draft
from opdtool.io.lengths import read_lengths
from opdtool.io.tensors import TensorSource, check_renames, open_tensors
from opdtool.jobs.reconstruct.bounds import plan_bound
from opdtool.jobs.reconstruct.find import (
    find_heads,
    integers,
    meta,
    naming,
    shard_sizes,
    tensor_at,
)
from opdtool.jobs.reconstruct.job import HIDDEN, INDEX, LOGITS, ReconstructJob, check_options
from opdtool.jobs.reconstruct.logprobs import scored_tokens
from opdtool.jobs.reconstruct.masks import Holder, beside, slot_weights
from opdtool.jobs.reconstruct.plan import HeadAt, Plan, TensorAt
from opdtool.jobs.reconstruct.recorded import (
    operands_precision,
    payload_precision,
    recorded,
    with_logits,
)


def make_plan(job: ReconstructJob) -> Plan:
    """The plan of a job.

    Raises:
        InputError: whatever cannot be right: see the contract's sections 3.6, 4, 5.4 and 6.
    """
    used: set[str] = set()
    check_options(job)
    with open_tensors([job.payload], rename=job.rename, strict_rename=False) as source:
        kind, payload = _payload(source, job)
        reference = recorded(job, "reference", used)
        student = recorded(job, "student", used)
        tp_size, cp_size = shard_sizes(job.tp, job.cp, job.reference, job.student)
        layout, grid, lengths = _layout(source, payload, job, cp_size, used)
        heads, routes = _heads(source, payload, kind, job, lengths, used)
        first = next(iter(heads.values()), None)
        vocabulary = first.weight.shape[0] if first else payload.shape[2]
        stored = first.weight.dtype if first else payload.dtype
        if job.d2t is not None and job.pad_vocab > 1:
            raise InputError(
                "--pad-vocab-to-multiple-of pads the head's rows, and --d2t takes some of them; "
                "leave out one of the two, or build a map of such a size"
            )
        draft = None if job.d2t is None else _draft(job.d2t, vocabulary, job.rename, used)
        real = vocabulary if draft is None else len(draft)
        padded = job.pad_vocab > 1
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
        if (reference or student) and not plan.lengths.any():
            raise InputError(
                f"{job.payload}: no row has a real token (input_lengths, attention_mask or "
                "cu_seqlens): nothing would be checked"
            )
        plan = replace(plan, payload_precision=payload_precision(plan, source))
        plan = with_logits(plan, job, reference, student)
        weights, masked = slot_weights(plan, job, source, used)
        if plan.student is not None and not weights.any():
            raise InputError(
                "the masks leave no position to weigh divergences by: nothing would be checked; "
                "give a batch that trains on something, or leave out --student"
            )
        plan = replace(plan, weights=weights, masked=masked)
        if job.logprobs is not None:
            bound = plan_bound(plan, operands_precision(plan, source), job.rtol, job.atol)
            scored = scored_tokens(plan, job, source, used)
            plan = replace(plan, scored=scored, score_bound=bound)
        check_renames(job.rename, source, _Used(used))
    return plan


@dataclass(frozen=True)
class _Used:
    used_renames: set[str]


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
    source: TensorSource, payload: TensorAt, job: ReconstructJob, cp_size: int, used: set[str]
) -> tuple[PackedLayout, TokenGrid, Ints]:
    """How units are cut into ranks, where their tokens are in the payload, and how many."""
    B, S, _ = payload.shape
    if not job.packed:
        multiple = 2 * cp_size if cp_size > 1 else 1
        padded = job.student_seq_len or -(-S // multiple) * multiple
        if padded < S:
            raise InputError(
                f"--student-seq-len is {padded}, but {payload.name} has {plural(S, 'position')}; "
                "the "
                "student's sequence must hold the payload"
            )
        if padded % multiple:
            raise InputError(
                f"--student-seq-len is {padded}, no multiple of {multiple} (2 x CP {cp_size}); "
                "a rank holds two equal chunks"
            )
        offsets = np.arange(B + 1, dtype=np.int64) * padded
        layout = PackedLayout.from_cu_seqlens(offsets, offsets, cp_size=cp_size)
        return layout, TokenGrid(width=S), _lengths(source, job, B, S, used)
    if B != 1:
        raise InputError(
            f"{payload.name} has {plural(B, 'row')}; --packed is for a payload [1, T, H]: leave it "
            "out"
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


def _lengths(source: TensorSource, job: ReconstructJob, B: int, S: int, used: set[str]) -> Ints:
    """Real tokens of every row, from the payload's file or else from the batch's."""
    with ExitStack() as stack:
        for one in reversed(beside(job.batch, job, source, used, stack)):
            if "input_lengths" not in one and "attention_mask" not in one:
                continue
            name = "input_lengths" if "input_lengths" in one else "attention_mask"
            path, lengths = _stored_lengths(one, name, B, S)
            long = np.flatnonzero(lengths > S)
            if len(long):
                raise InputError(
                    f"{path}: {name} gives row {long[0]} {lengths[long[0]]} tokens, but the "
                    f"payload has {plural(S, 'position')}; give the lengths of the same batch"
                )
            return lengths
    return np.full(B, S, np.int64)


def _stored_lengths(source: Holder, name: str, B: int, S: int) -> tuple[Path, Ints]:
    """The lengths that ``name`` says, one for each of B rows, and the (first) file they are in."""
    if isinstance(source, Batch):
        if source.rows != B:
            raise InputError(
                f"{source.paths[0]} and {len(source.paths) - 1} more have "
                f"{plural(source.rows, 'row')} together, but the payload has {plural(B, 'row')}; "
                "give the files of the same batch"
            )
        return source.paths[0], source.lengths
    width = S
    if "attention_mask" in source:
        width = max([S, *source.info("attention_mask").shape[1:2]])
    path = source.path_of(name)
    return path, read_lengths(source, path, B, width)[0]


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
        if head.norm is not None:
            check_multipliable(f"the norm of teacher {head.index}", head.norm.weight.dtype)
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
            f"{job.payload}: {INDEX} has {plural(len(tags), 'entry')} for {plural(units, word)}; "
            "expected one a "
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
