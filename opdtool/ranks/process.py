"""One process a rank: groups on ``torch.distributed``, gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opdtool.core.group import TorchGroup
from opdtool.ranks.errors import RankError


class ProcessGroup(TorchGroup):
    """A ``torch.distributed`` process group whose failures name the rank that saw them.

    Ranks that disagree on a collective, a dtype or a shape all raise ``InputError``. A rank
    that died, or that never comes, is a :class:`RankError` on the others once the backend
    notices or its timeout (``init_process_group(timeout=...)``) is over.

    Tensors may be on any device: where the backend cannot move them from there (NCCL and a
    tensor on the CPU) they travel by way of ``device`` and come back to where they were.
    """

    def __init__(
        self, group: object | None = None, *, device: torch.device | None = None, check: bool = True
    ) -> None:
        super().__init__(_world_group() if group is None else group, check=check)
        self.device = transport_device(self.group) if device is None else device

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        home = tensor.device
        sent = self._departing(tensor)
        received = self._named("all_gather", lambda: super(ProcessGroup, self).all_gather(sent))
        return [each.to(home) for each in received]

    def all_to_all(
        self, tensors: Sequence[Tensor], widths: Sequence[int] | None = None
    ) -> list[Tensor]:
        home = tensors[0].device if tensors else torch.device("cpu")
        sent = [self._departing(tensor) for tensor in tensors]
        received = self._named(
            "all_to_all", lambda: super(ProcessGroup, self).all_to_all(sent, widths)
        )
        return [each.to(home) for each in received]

    def _departing(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device)

    def _named(self, name: str, collective: Callable[[], list[Tensor]]) -> list[Tensor]:
        try:
            return collective()
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size} could not complete {name}: "
                f"{_plain(error)}; another rank has failed, or did not come in time",
                rank=self.rank,
            ) from error


def _plain(error: RuntimeError) -> str:
    """The first line of a backend's error, without the source file that it begins with."""
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error).splitlines()[0])


def transport_device(group: object) -> torch.device:
    """The device from which the group's backend moves tensors: the current GPU under NCCL."""
    backend = str(torch.distributed.get_backend(group))  # type: ignore[arg-type]
    if "nccl" in backend and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _world_group() -> object:
    group: object = torch.distributed.group.WORLD
    if group is None:
        raise RankError("torch.distributed is not initialised: call init_process_group first")
    return group
