"""All checks of one pack: its layout, then every tensor of it against the batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

from opdtool.checks.content import (
    IGNORED,
    ContentCase,
    Kind,
    common_fill,
    scan_content,
)
from opdtool.checks.content_verdict import (
    CODES,
    OTHER,
    ContentPack,
    follows_padding,
)
from opdtool.checks.layout import check_layout
from opdtool.checks.layout_outcome import LayoutOutcome, PackVectors
from opdtool.checks.masks import neighbours
from opdtool.checks.masks_sample import sample_slots
from opdtool.checks.masks_verdict import DumpedMask, check_mask
from opdtool.checks.recipes_values import Slots, as_keys
from opdtool.core.errors import InputError
from opdtool.core.words import plural
from opdtool.findings import Status
from opdtool.io.tensors import TORCH_DTYPES
from opdtool.jobs.batch_errors import naming_batch
from opdtool.jobs.dump_files import DumpPack
from opdtool.jobs.verify_mask import is_whole, read_vectors
from opdtool.jobs.verify_pack.found import PackRun
from opdtool.jobs.verify_pack.tensors import (
    Packed,
    as_floats,
    moved,
    packed_shape,
    slot_reader,
    slots_by,
)

DERIVED: Mapping[str, Kind] = {
    "input_ids": "tokens",
    "target_ids": "targets",
    "position_ids": "positions",
}
MASK = "draft_token_mask"
WIDE = frozenset({"F64", "I64", "U64", "I32", "U32"})
"""Dtypes whose values float32 does not hold."""
NOT_CONTENT = (MASK, "cu_seqlens", "cu_seqlens_padded", "sequence_index", "input_lengths")


def check_pack(run: PackRun, pack: DumpPack) -> None:
    """All checks of one pack.

    Raises:
        InputError: it holds no packed tensor of the batch's.
    """
    shapes = _packed_tensors(run, pack)
    if not shapes:
        raise InputError(
            f"{pack.files[0]}: holds no packed tensor of the batch's; expected input_ids, "
            "target_ids or position_ids [1,T/CP]"
        )
    _note_missing(run, pack, shapes)
    vectors, agree = read_vectors(pack, run.files)
    first = slots_by(shapes, vectors["cu_seqlens_padded"])
    sizes = [shape.slots for shape in shapes[first]]
    whole = is_whole(pack, sizes, vectors, run.batch, run.geometry)
    outcome = check_layout(
        PackVectors(
            **vectors,
            lengths=run.batch.lengths,
            geometry=run.geometry,
            slots=sum(sizes),
            whole=whole,
        )
    )
    outcome.findings += agree
    run.outcomes.append((pack.name, outcome))
    if len(set(sizes)) > 1:
        outcome.layout = None
    good = True
    own_ids: Slots | None = None
    for name, shape in shapes.items():
        found = [each.slots for each in shape]
        if found != sizes or len(set(found)) > 1:
            message = f"{found} slots a rank; {first} has {sizes}"
            run.note(pack.name, "OPD207", "fail", message, name)
            continue
        run.note(pack.name, "OPD207", "pass", f"{plural(sum(sizes), 'slot')}", name)
        if name == MASK:
            good &= _check_mask(run, pack, outcome, shape, whole)
            continue
        wrong_dtype = _wrong_dtype(run, pack, name)
        if wrong_dtype:
            good = False
            run.note(pack.name, CODES.get(name, OTHER), "fail", wrong_dtype, name)
            continue
        content = _check_tensor(run, pack, outcome, name, shape, whole, own_ids)
        if name == "input_ids":
            own_ids = content.case.slots
            followed = follows_padding(content.case, outcome)
            if followed is not None:
                good = False
                outcome.faults[followed] = "tokens past the rows' lengths were packed as real"
        good &= content.case.mismatches == 0
    good &= _check_rows(run, pack, outcome)
    outcome.settle(good and outcome.layout is not None)


def _note_missing(run: PackRun, pack: DumpPack, shapes: Mapping[str, object]) -> None:
    """Say which tensors the pack lacks: without tokens it is none, the rest it may do without."""
    ids = "input_ids" in run.batch.token_aligned
    for name, code in CODES.items():
        if name in shapes or (not ids and name != "position_ids"):
            continue
        status: Status = "fail" if name == "input_ids" else "skip"
        message = f"{pack.files[0].name} holds no {name}"
        message += "; a pack holds its tokens" if status == "fail" else ": not checked"
        run.note(pack.name, code, status, message, name)
    if run.weights is not None and MASK not in shapes:
        run.note(
            pack.name, "OPD301", "skip", f"{pack.files[0].name} holds no {MASK}: not checked", MASK
        )


def _wrong_dtype(run: PackRun, pack: DumpPack, name: str) -> str | None:
    """Why values of a dtype cannot be those of the batch: floats for integers or the reverse,
    or not the same on every rank."""
    source = "input_ids" if name == "target_ids" else name
    integers = name == "position_ids" or not run.batch.info(source).torch_dtype.is_floating_point
    found = {run.files.source(path).info(name).torch_dtype for path in pack.files}
    if name not in DERIVED:
        return None
    if len(found) > 1:
        return f"has another dtype on every rank: {', '.join(sorted(map(str, found)))}"
    if integers == found.pop().is_floating_point:
        stored = run.files.source(pack.files[0]).info(name).dtype
        wanted = "integers" if integers else "floating point"
        return f"has dtype {stored}; expected {wanted}, as in the batch"
    return None


def _packed_tensors(run: PackRun, pack: DumpPack) -> dict[str, list[Packed]]:
    """The pack's tensors that can be compared with the batch, input_ids first, with their
    shapes in every rank's file."""
    source, batch = run.files.source(pack.files[0]), run.batch
    names = [name for name in DERIVED if name in source]
    if run.weights is not None and MASK in source:
        names.append(MASK)
    names += [
        name
        for name in source.names()
        if name in batch.token_aligned and name not in DERIVED and name not in NOT_CONTENT
    ]
    if "input_ids" not in batch.token_aligned:
        names = [name for name in names if name not in ("input_ids", "target_ids")]
    known = {*names, *NOT_CONTENT, *batch.row_aligned}
    run.unknown |= {name for name in source.names() if name not in known}
    shapes: dict[str, list[Packed]] = {}
    for name in names:
        token = () if name in DERIVED or name == MASK else batch.info(name).shape[2:]
        found = [packed_shape(run.files, path, name, token) for path in pack.files]
        shapes[name] = found
    return shapes


def _check_mask(
    run: PackRun, pack: DumpPack, outcome: LayoutOutcome, shape: list[Packed], whole: bool
) -> bool:
    assert run.weights is not None
    dumped = DumpedMask(
        name=pack.name,
        tensor=MASK,
        pieces=[
            slot_reader(run.files, path, MASK, each)
            for path, each in zip(pack.files, shape, strict=True)
        ],
        sizes=[each.slots for each in shape],
        vectors={},
        whole=whole,
    )
    with naming_batch(run.batch):
        found = check_mask(dumped, outcome, run.batch.width, run.weights, run.geometry)
    run.keep_sample(MASK, found.case)
    run.masks.append(found)
    return found.case.mismatches == 0


def _check_tensor(
    run: PackRun,
    pack: DumpPack,
    outcome: LayoutOutcome,
    name: str,
    shape: list[Packed],
    whole: bool,
    own_ids: Slots | None,
) -> ContentPack:
    kind = DERIVED.get(name, "strict")
    source = "input_ids" if kind == "targets" else name
    size = prod(shape[0].token)
    stored = {run.files.source(path).info(name).dtype for path in pack.files}
    batch_has = kind != "positions"
    if batch_has:
        stored.add(run.batch.info(source).dtype)
    floats = kind == "strict" and any(TORCH_DTYPES[each].is_floating_point for each in stored)
    wide = bool(stored & WIDE)
    decode = partial(as_keys, wide=wide, floats=floats)
    case = ContentCase(
        slots=Slots(
            pieces=[
                slot_reader(run.files, path, name, each)
                for path, each in zip(pack.files, shape, strict=True)
            ],
            sizes=[each.slots for each in shape],
            decode=decode,
            token_size=size,
            room=run.room,
        ),
        rows=outcome.rows,
        lengths=outcome.lengths,
        width=run.batch.width,
        layout=outcome.layout,
        geometry=run.geometry,
        whole=whole or run.geometry.cp_size == 1,
        dump_lengths=outcome.dump_lengths,
        kind=kind,
        cells=run.cells_of(source, decode, size, wide=wide, floats=floats) if batch_has else None,
        own_ids=own_ids,
    )
    fill = common_fill(case)
    known = {0, IGNORED} if kind == "targets" else {0}
    case.neutral = tuple(known | ({fill} if fill is not None and kind != "strict" else set()))
    scan = scan_content(
        case, (lambda rows: run.batch.read(source, rows)) if batch_has else None, size
    )
    if case.mismatches:
        case.sample = sample_slots(case.slots.total, scan.wrong)
    run.keep_sample(name, case)
    scan.wrong.clear()
    case.slots.forget()
    found = ContentPack(name=pack.name, tensor=name, case=case, scan=scan, hashed=size > 1)
    if floats and size == 1:
        as_floats(scan.values, wide)
        as_floats(scan.padding, wide)
    run.tensors.setdefault(name, []).append(found)
    return found


def _check_rows(run: PackRun, pack: DumpPack, outcome: LayoutOutcome) -> bool:
    """Tensors with one entry a row, which go by sequence_index."""
    good = True
    for name in run.batch.row_aligned:
        for path in pack.files:
            found = run.files.maybe(path, name)
            if found is None:
                continue
            expected = run.batch.read(name, neighbours(outcome.rows))
            if found.shape != expected.shape or not moved(found, expected):
                good = False
                message = f"{path.name}: differs from the batch's rows in sequence_index order"
                run.note(pack.name, "OPD205", "fail", message, name)
                break
        else:
            if any(name in run.files.source(path) for path in pack.files):
                run.note(pack.name, "OPD205", "pass", "in sequence_index order", name)
    return good
