"""One way for commands to run rank-local work: simulated, spawned, or under torchrun.

    with open_ranks(mode, tp_size=2, cp_size=2, timeout=300, device="auto") as ranks:
        results = ranks.run(work, plan)

``work(topology, plan)`` runs once on every rank, wherever the ranks are; what it returns
comes back in rank order. The body of the ``with`` runs in one process alone (the only one,
the parent of the spawned ones, or torchrun's rank 0): there the command plans, opens its
output directory, merges, and prints. The other processes never enter the body; they do their
work and end with the command's exit status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from opdtool.core.errors import InputError
from opdtool.core.limits import check_ranks
from opdtool.ranks.ending import exit_status, refuse_sigterm, under_torchrun
from opdtool.ranks.perform import check_device_name, rank_device
from opdtool.ranks.topology import Topology, describe_rank, make_topology

if TYPE_CHECKING:
    from opdtool.ranks.driver import Driver

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks of one run, seen from the process that drives them."""

    tp_size: int
    cp_size: int
    dp_size: int
    timeout: float
    device: str
    driver: Driver | None = None

    @property
    def world_size(self) -> int:
        """TP x CP x DP."""
        return self.tp_size * self.cp_size * self.dp_size

    def simulated(self) -> Ranks:
        """One replica's ranks, simulated in this process."""
        return replace(self, dp_size=1, driver=None)

    def name(self, rank: int) -> str:
        """The rank as errors name it."""
        return describe_rank(rank, self.world_size, self.tp_size, self.cp_size)

    def run(
        self,
        work: Callable[Concatenate[Topology, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """What ``work(topology, *args)`` returns on every rank, in rank order.

        ``work`` is a function of a module, and its arguments and result can be pickled: they
        may travel between processes. It exchanges no tensors; see :meth:`run_collective`.

        Raises:
            InputError: a rank refused its input; the rank is named in front.
            RankError: a rank failed in another way, died, or stopped answering.
        """
        return self._run(work, args, kwargs)

    def run_collective(
        self,
        work: Callable[Concatenate[Topology, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """As :meth:`run`, for work that exchanges tensors through the topology's groups."""
        return self._run(work, args, kwargs, collectives=True)

    def run_together(
        self,
        work: Callable[Concatenate[Topology, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """As :meth:`run`, for work that can stand for several ranks at once.

        Simulated ranks are then one call, with all of ``tp_ranks`` and ``cp_ranks``, so that
        what they share is read and computed once. In processes it is one call a rank.
        """
        if self.driver is None:
            return [work(self._all_at_once(), *args, **kwargs)]
        return self._run(work, args, kwargs)

    def run_writing(
        self,
        scratch: Path,
        work: Callable[Concatenate[Topology, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """As :meth:`run_together`, for work that writes into the directory ``scratch``."""
        self.guard(scratch)
        return self.run_together(work, *args, **kwargs)

    def guard(self, directory: Path) -> None:
        """From the next task on: should this process be lost, the ranks that are left take
        ``directory`` away."""
        if self.driver is not None:
            self.driver.scratch = str(directory.absolute())

    def _run(
        self,
        work: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        collectives: bool = False,
    ) -> list[T]:
        if kwargs:
            from functools import partial

            work = partial(work, **kwargs)
        if self.driver is None:
            return self._simulate(work, args, collectives)
        from opdtool.ranks.perform import Task

        task = Task(
            work=work,
            args=args,
            tp_size=self.tp_size,
            cp_size=self.cp_size,
            device=self.device,
            backend=self._backend() if collectives else None,
            scratch=self.driver.scratch,
        )
        try:
            return self.driver.run(task)
        except BaseException as error:
            # Before the body tidies up: nobody may write into what it takes away.
            refuse_sigterm()
            self.driver.end(exit_status(error))
            raise

    def _backend(self) -> str:
        assert self.driver is not None
        own_gpu = all(greeting.own_gpu for greeting in self.driver.greetings.values())
        return "nccl" if own_gpu and self.device in ("auto", "cuda") else "gloo"

    def _all_at_once(self) -> Topology:
        topology = make_topology(
            0, self.world_size, self.tp_size, self.cp_size, rank_device(self.device, 0)
        )
        return replace(
            topology,
            tp_ranks=tuple(range(self.tp_size)),
            cp_ranks=tuple(range(self.cp_size)),
        )

    def _simulate(
        self, work: Callable[..., T], args: tuple[Any, ...], collectives: bool
    ) -> list[T]:
        device = rank_device(self.device, 0)
        topologies = [
            make_topology(rank, self.world_size, self.tp_size, self.cp_size, device)
            for rank in range(self.world_size)
        ]
        if collectives and self.world_size > 1:
            return self._simulate_grid(work, args, topologies)
        results = []
        for topology in topologies:
            try:
                results.append(work(topology, *args))
            except InputError as error:
                if self.world_size == 1:
                    raise
                raise InputError(f"{self.name(topology.rank)}: {error}") from error
        return results

    def _simulate_grid(
        self, work: Callable[..., T], args: tuple[Any, ...], topologies: list[Topology]
    ) -> list[T]:
        from opdtool.ranks.simulated import SimulatedGroup, run_simulated

        def rank_local(everyone: SimulatedGroup) -> T:
            me = topologies[everyone.rank]
            tp = [t.rank for t in topologies if t.cp_rank == me.cp_rank]
            cp = [t.rank for t in topologies if t.tp_rank == me.tp_rank]
            return work(
                replace(me, tp_group=everyone.among(tp), cp_group=everyone.among(cp)), *args
            )

        return run_simulated(self.world_size, rank_local, timeout=self.timeout, name=self.name)


@contextmanager
def open_ranks(
    mode: str,
    *,
    tp_size: int = 1,
    cp_size: int = 1,
    timeout: float = 300.0,
    device: str = "auto",
) -> Iterator[Ranks]:
    """All TP x CP ranks, run as ``mode`` says, or by torchrun where it started this process.

    Under torchrun the world size over TP x CP is the data-parallel size; every process but
    rank 0's ends in here, with the status of rank 0's command. ``timeout`` is in seconds: the
    longest that a rank may stay silent or wait for others.

    Raises:
        InputError: the world size is no multiple of TP x CP, these are more ranks than anybody
            has, the timeout is not positive, or a device is none or not there.
        RankError: a rank did not start.
    """
    if not timeout > 0:
        raise InputError(f"--timeout is {timeout:g}; it must be more than 0 seconds")
    check_ranks(tp_size, cp_size)
    check_device_name(device)
    ranks = Ranks(tp_size=tp_size, cp_size=cp_size, dp_size=1, timeout=timeout, device=device)
    if under_torchrun():
        from opdtool.ranks.torchrun import torchrun_ranks

        with torchrun_ranks(ranks) as opened:
            yield opened
    elif mode == "spawn" and ranks.world_size > 1:
        from opdtool.ranks.spawn import spawned_ranks

        with spawned_ranks(ranks) as opened:
            yield opened
    else:
        rank_device(device, 0)
        yield ranks
