"""What a rank group is. Core functions take one and never ask the world who they are.

Two kinds are here: the :class:`Group` protocol, which the simulated group of ``opdtool.ranks``
follows too, and :class:`TorchGroup`, which speaks it over ``torch.distributed``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.words import plural


@runtime_checkable
class Group(Protocol):
    """A set of ranks that exchange tensors.

    Both the simulated groups and the torch.distributed ones of ``opdtool.ranks`` are
    groups. Every collective must be entered by all ranks of the group.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the group, 0..size-1."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, in rank order. All have one shape and dtype. No autograd."""

    def all_to_all(
        self, tensors: Sequence[Tensor], widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send ``tensors[r]`` to rank r; returns what each rank sent here. No autograd.

        Shapes may differ from rank to rank in their last dimension alone; all other
        dimensions and the dtype agree over the group. ``widths[r]`` is the last dimension of
        what rank r sends here, where the caller knows it; else the ranks tell each other.
        """


def is_group(group: object) -> TypeGuard[Group]:
    """Whether ``group`` speaks :class:`Group`. torch's ProcessGroup has methods of these names."""
    return isinstance(group, Group) and isinstance(group.rank, int)


def group_rank_size(
    group: object | None, name: str = "the group", rank: int | None = None
) -> tuple[int, int]:
    """(rank, size) of a group: ours, a ``torch.distributed`` one, or None for a single rank.

    A group that is not one of ours is asked through ``torch.distributed.get_rank`` and
    ``get_world_size`` at call time; ``rank``, where the caller knows it, stands for a rank that
    it cannot be asked for.

    Raises:
        InputError: ``name`` cannot be asked, or this process is no member of it.
    """
    if group is None:
        return 0, 1
    if is_group(group):
        own, size = group.rank, group.size
    else:
        try:
            own = _asked(group, name, "rank", torch.distributed.get_rank)
        except InputError:
            if rank is None:
                raise
            own = rank
        size = _asked(group, name, "size", torch.distributed.get_world_size)
    if not 0 <= own < size:
        raise InputError(
            f"this process is not in {name}: its rank there is {own} of {size}; "
            "pass a group that it is a member of"
        )
    return own, size


def _asked(group: object, name: str, what: str, ask: Callable[[Any], int]) -> int:
    try:
        return ask(group)
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name} is a {type(group).__name__} that cannot be asked for its {what} ({why}); "
            "pass an initialised group"
        ) from error


def as_group(group: object) -> Group:
    """A group that speaks :class:`Group`: ``group`` itself, or a :class:`TorchGroup` around it."""
    return group if is_group(group) else TorchGroup(group)


# What each element of a dtype travels as: the same bytes, in a dtype every backend moves.
_CARRIER = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class TorchGroup:
    """A ``torch.distributed`` process group as a :class:`Group`.

    Functions are looked up on ``torch.distributed`` when they are called. Tensors travel as
    the same number of elements of an equally wide dtype, so that every dtype works on every
    backend; nothing is ever added up, so that the bits arrive as they left.

    With ``check`` the ranks first tell each other what they are about to do, and all of them
    raise the same error when they do not agree: backends themselves hang or crash. It costs
    a small collective, and on CUDA a synchronisation.
    """

    def __init__(
        self, group: Any, *, check: bool = False, place: tuple[int, int] | None = None
    ) -> None:
        self.group = group
        self.check = check
        self._rank, self._size = group_rank_size(group) if place is None else place

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self.check:
            self._agree("all_gather", tensor.dtype, tensor.shape, (), tensor.device)
        return self._all_gather(tensor)

    def all_to_all(
        self, tensors: Sequence[Tensor], widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        check_messages(tensors, self.size, self.rank, widths)
        lead, dtype, device = tensors[0].shape[:-1], tensors[0].dtype, tensors[0].device
        leaving = [tensor.shape[-1] for tensor in tensors]
        if self.check:
            told = self._agree("all_to_all", dtype, lead, [*leaving, *(widths or ())], device)
            for rank, row in enumerate(told):
                coming = [other[rank] for other in told]
                check_widths(coming, row[self.size :] if row[-1] >= 0 else None, rank)
            arriving = [row[self.rank] for row in told]
        elif widths is None:
            told_widths = self._all_gather(torch.tensor(leaving, device=device))
            arriving = [int(row[self.rank]) for row in told_widths]
        else:
            arriving = list(widths)
        each = lead.numel()
        sent = torch.cat([_carried(tensor).reshape(-1) for tensor in tensors])
        received = sent.new_empty(each * sum(arriving))
        torch.distributed.all_to_all_single(
            received,
            sent,
            output_split_sizes=[each * width for width in arriving],
            input_split_sizes=[each * width for width in leaving],
            group=self.group,
        )
        pieces = torch.split(received, [each * width for width in arriving])
        return [
            piece.view(dtype).reshape(*lead, width)
            for piece, width in zip(pieces, arriving, strict=True)
        ]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        sent = _carried(tensor)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        torch.distributed.all_gather(received, sent, group=self.group)
        return [each.view(tensor.dtype).reshape(tensor.shape) for each in received]

    def _agree(
        self,
        name: str,
        dtype: torch.dtype,
        dims: Sequence[int],
        widths: Sequence[int],
        device: torch.device,
    ) -> list[list[int]]:
        """Hold one collective's name, dtype and dimensions equal over the ranks.

        Returns every rank's ``widths``, which may differ: up to two numbers a rank of the
        group, filled up with -1.
        """
        if len(dims) > 8:
            raise InputError(f"a tensor of {len(dims)} dimensions cannot be exchanged; at most 8")
        words = [zlib.crc32(name.encode()), zlib.crc32(str(dtype).encode()), len(dims), *dims]
        words += [-1] * (11 - len(words))
        told_widths = [*widths, *[-1] * (2 * self.size - len(widths))]
        told = self._all_gather(torch.tensor(words + told_widths, device=device))
        rows: list[list[int]] = [row.tolist() for row in told]
        for rank, row in enumerate(rows):
            if row[:11] != rows[0][:11]:
                raise InputError(
                    f"the ranks disagree: rank 0 enters {_said(rows[0])}, rank {rank} {_said(row)}"
                )
        return [row[11:] for row in rows]


def check_messages(
    tensors: Sequence[Tensor], size: int, rank: int, widths: Sequence[int] | None = None
) -> None:
    """Refuse messages that are not one a rank, of one dtype and equal but for the last dimension.

    Raises:
        InputError: naming the rank and the first message that differs.
    """
    if len(tensors) != size:
        raise InputError(
            f"rank {rank} has {plural(len(tensors), 'tensor')} to send in a group of "
            f"{plural(size, 'rank')}; one a rank is needed, its own included"
        )
    if widths is not None and len(widths) != size:
        raise InputError(
            f"rank {rank} expects {plural(len(widths), 'message')} in a group of "
            f"{plural(size, 'rank')}"
        )
    first = tensors[0]
    for to, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            raise InputError(f"rank {rank} sends a scalar to rank {to}; at least one dimension")
        if (tensor.dtype, tensor.shape[:-1]) != (first.dtype, first.shape[:-1]):
            raise InputError(
                f"rank {rank} sends {tensor.dtype} {list(tensor.shape)} to rank {to} but "
                f"{first.dtype} {list(first.shape)} to rank 0; only the last dimension may differ"
            )


def check_widths(arriving: Sequence[int], expected: Sequence[int] | None, rank: int) -> None:
    """Refuse messages whose last dimensions are not what the receiver was told to expect."""
    if expected is None or list(arriving) == list(expected):
        return
    wrong = next(r for r, width in enumerate(arriving) if width != expected[r])
    raise InputError(
        f"the ranks disagree in all_to_all: rank {rank} expects "
        f"{plural(expected[wrong], 'column')} of rank {wrong}, which sends {arriving[wrong]}"
    )


_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_NAMES = {
    zlib.crc32(name.encode()): name for name in ("all_gather", "all_to_all", *map(str, _DTYPES))
}


def _said(row: Sequence[int]) -> str:
    """What a rank told of the collective that it enters."""
    name, dtype = (_NAMES.get(word, "another") for word in row[:2])
    return f"{name} with {dtype} {list(row[3 : 3 + row[2]])}"


def _carried(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous, as elements that every backend moves."""
    return tensor.detach().contiguous().view(_CARRIER.get(tensor.element_size(), tensor.dtype))
