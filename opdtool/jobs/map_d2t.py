"""What every rank does in ``map-d2t``: its shard of each block in, its draft columns out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from opdtool.checks.vocab_logits import Tally, compare_block, differs, wrong_columns
from opdtool.core.errors import InputError
from opdtool.core.vocab import ids_from_d2t, map_teacher_logits_to_draft_vocab
from opdtool.io.tensors import TensorSource, open_tensors
from opdtool.io.writer import TensorFileWriter, TensorSpec
from opdtool.ranks.topology import Topology

NAMES = ("teacher_logits", "teacher_full_logits")
"""What a file's logits are called."""
MOST_BYTES = 32 << 20
"""Logits read at once; more is no faster."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows and positions of the logits that are mapped at once."""

    rows: slice
    positions: slice

    @property
    def count(self) -> int:
        """How many positions it has in all."""
        rows, positions = self.rows, self.positions
        return int((rows.stop - rows.start) * (positions.stop - positions.start))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Recorded logits: a file, the name of their tensor in it, whether that has all V columns
    (else the D of the draft vocabulary), and the bytes of one position."""

    path: Path
    name: str
    whole: bool
    position_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPlan:
    """What is mapped: plain values, so that it can be sent to another process.

    ``name`` [B, S, V] is the name that the file ``logits`` has for it.
    """

    logits: Path
    name: str
    dtype: str
    shape: tuple[int, int, int]
    d2t: Tensor
    blocks: tuple[Block, ...]
    reference: Recorded | None = None
    rtol: float = 0.0
    atol: float = 0.0

    @property
    def D(self) -> int:  # noqa: N802
        """Draft ids."""
        return int(self.d2t.numel())

    def open_logits(self) -> TensorSource:
        """The file with the logits."""
        return open_tensors([self.logits])


def find_logits(source: TensorSource, path: Path, name: str | None = None) -> str:
    """The name of a file's logits [B, S, V].

    Raises:
        InputError: there are none, two, or they are not [B, S, V] of floating point.
    """
    there = [one for one in NAMES if one in source] if name is None else [name]
    if len(there) > 1:
        raise InputError(f"{path}: it has {' and '.join(there)}; choose with --name")
    return _checked(source, path, there)


def find_reference(source: TensorSource, path: Path, D: int) -> str:
    """The name of recorded logits, of two those with D columns.

    Raises:
        InputError: there are none, two of which no one alone has D columns, or they are not
            [B, S, V] of floating point.
    """
    there = [one for one in NAMES if one in source]
    if len(there) > 1:
        drafted = [one for one in there if source.info(one).shape[-1:] == (D,)]
        if len(drafted) != 1:
            raise InputError(
                f"{path}: it has {' and '.join(there)}, and not just one of them {D} columns; "
                "give a file with the one to compare with"
            )
        there = drafted
    return _checked(source, path, there)


def _checked(source: TensorSource, path: Path, there: Sequence[str]) -> str:
    if not there:
        source.require(NAMES[0])
    info = source.require(there[0])
    if len(info.shape) != 3 or 0 in info.shape or not info.torch_dtype.is_floating_point:
        raise InputError(
            f"{path}: {there[0]} is {info.dtype} {list(info.shape)}; logits [B, S, V] are expected"
        )
    return there[0]


def cut_blocks(shape: tuple[int, int, int], positions: int) -> tuple[Block, ...]:
    """Blocks of at most ``positions`` positions that cover [B, S]: whole rows where they fit."""
    B, S, _ = shape
    if positions >= S:
        step = positions // S
        return tuple(Block(slice(b, min(b + step, B)), slice(0, S)) for b in range(0, B, step))
    return tuple(
        Block(slice(b, b + 1), slice(s, min(s + positions, S)))
        for b in range(B)
        for s in range(0, S, positions)
    )


def shard_name(tp_rank: int, dp_rank: int) -> str:
    """The file that a rank in a process of its own leaves for the driver."""
    return f"shard.tp{tp_rank}.dp{dp_rank}.safetensors"


def map_rank(
    topology: Topology,
    plan: MapPlan,
    writer: TensorFileWriter | None = None,
    scratch: Path | None = None,
    advance: Callable[[int], None] | None = None,
) -> Tally:
    """Map this rank's columns of its replica's blocks; returns what was compared.

    ``writer`` is the output itself, and ``advance`` is told of each block's positions, for
    ranks in the driver's process; others leave their columns in ``scratch``.
    """
    V, D = plan.shape[2], plan.D
    V_local, D_local = V // topology.tp_size, D // topology.tp_size
    mine = slice(topology.tp_rank * V_local, (topology.tp_rank + 1) * V_local)
    first = topology.tp_rank * D_local
    ids = ids_from_d2t(plan.d2t, V)[first : first + D_local]
    tally = Tally()
    at = 0
    with ExitStack() as stack:
        source = stack.enter_context(plan.open_logits())
        reference = (
            stack.enter_context(open_tensors([plan.reference.path])) if plan.reference else None
        )
        blocks = topology.share(plan.blocks)
        shard = _shard(stack, topology, plan, scratch, blocks)
        for block in blocks:
            logits = source.read(plan.name, block.rows, block.positions, mine)
            mapped = map_teacher_logits_to_draft_vocab(
                logits.to(topology.device), plan.d2t, topology.tp_rank, topology.tp_group
            ).cpu()
            corner = (block.rows.start, block.positions.start, first)
            if writer is not None:
                writer.write("teacher_logits", mapped, *corner)
            if shard is not None:
                shard.write("columns", mapped.reshape(-1, D_local), at)
            at += block.count
            if advance is not None and topology.tp_rank == 0:
                advance(block.count)
            if reference is not None:
                recorded = read_reference(
                    reference, plan, block, slice(first, first + D_local), ids
                )
                tally.merge(
                    compare_block(mapped, recorded, rtol=plan.rtol, atol=plan.atol, corner=corner)
                )
    return tally


def _shard(
    stack: ExitStack,
    topology: Topology,
    plan: MapPlan,
    scratch: Path | None,
    blocks: Sequence[Block],
) -> TensorFileWriter | None:
    if scratch is None or not blocks:
        return None
    shape = (sum(block.count for block in blocks), plan.D // topology.tp_size)
    spec = TensorSpec("columns", plan.dtype, shape)
    return stack.enter_context(
        TensorFileWriter(scratch / shard_name(topology.tp_rank, topology.dp_rank), [spec])
    )


def read_reference(
    source: TensorSource, plan: MapPlan, block: Block, columns: slice, ids: Tensor
) -> Tensor:
    """A block of the recorded draft columns; of all V columns, those of ``ids``."""
    assert plan.reference is not None
    name = plan.reference.name
    if plan.reference.whole:
        return source.read(name, block.rows, block.positions).index_select(-1, ids)
    return source.read(name, block.rows, block.positions, columns)


def join_shards(
    scratch: Path, plan: MapPlan, writer: TensorFileWriter, tp_size: int, dp_size: int
) -> None:
    """Put the columns that ranks in processes of their own have left into the output."""
    D_local = plan.D // tp_size
    for dp_rank in range(dp_size):
        blocks = plan.blocks[dp_rank::dp_size]
        for tp_rank in range(tp_size if blocks else 0):
            with open_tensors([scratch / shard_name(tp_rank, dp_rank)]) as source:
                at = 0
                for block in blocks:
                    piece = source.read("columns", slice(at, at + block.count))
                    at += block.count
                    rows = block.rows.stop - block.rows.start
                    writer.write(
                        "teacher_logits",
                        piece.reshape(rows, -1, D_local),
                        block.rows.start,
                        block.positions.start,
                        tp_rank * D_local,
                    )


def find_misreadings(plan: MapPlan) -> list[str]:
    """Which misreadings of the map make what was recorded, at every position.

    Blocks are read until no misreading is left, so that a reference that none explains costs
    little.
    """
    assert plan.reference is not None
    alive = wrong_columns(plan.d2t, plan.shape[2])
    everything = slice(0, plan.D)
    right = ids_from_d2t(plan.d2t, plan.shape[2])
    with plan.open_logits() as source, open_tensors([plan.reference.path]) as reference:
        for block in plan.blocks:
            if not alive:
                break
            logits = source.read(plan.name, block.rows, block.positions)
            recorded = read_reference(reference, plan, block, everything, right)
            alive = dict(_still_equal(alive, logits, recorded, plan))
    return list(alive)


def _still_equal(
    alive: dict[str, Tensor], logits: Tensor, recorded: Tensor, plan: MapPlan
) -> Iterator[tuple[str, Tensor]]:
    for fault, ids in alive.items():
        made = logits.index_select(-1, ids)
        if not bool(differs(recorded, made, plan.rtol, plan.atol).any()):
            yield fault, ids
