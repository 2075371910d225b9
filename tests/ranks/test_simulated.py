"""All ranks in one process: what the collectives bring, and what ends a run."""

from __future__ import annotations

import time

import pytest
import torch

from opdtool.core.errors import InputError
from opdtool.core.group import Group, group_rank_size, is_group
from opdtool.ranks.errors import RankError
from opdtool.ranks.simulated import SimulatedGroup, run_simulated


def test_all_gather_brings_every_ranks_tensor_in_rank_order() -> None:
    got = run_simulated(3, lambda group: group.all_gather(torch.tensor([10 * group.rank])))
    assert [[t.item() for t in each] for each in got] == [[0, 10, 20]] * 3


def test_all_to_all_brings_to_each_rank_what_was_sent_to_it() -> None:
    def ring(group: SimulatedGroup) -> list[list[int]]:
        sent = [torch.full((to + 1,), 10 * group.rank + to) for to in range(group.size)]
        return [t.tolist() for t in group.all_to_all(sent, [group.rank + 1] * group.size)]

    assert run_simulated(2, ring) == [[[0], [10]], [[1, 1], [11, 11]]]


def test_one_rank_alone_meets_itself() -> None:
    got = run_simulated(1, lambda group: group.all_to_all([torch.tensor([7])])[0].item())
    assert got == [7]


def test_what_arrives_is_a_copy_that_the_sender_can_no_longer_change() -> None:
    def send_then_spoil(group: SimulatedGroup) -> list[int]:
        mine = torch.tensor([group.rank + 1])
        got = group.all_gather(mine)
        mine.fill_(99)
        group.all_gather(mine)
        return [int(t) for t in got]

    assert run_simulated(3, send_then_spoil) == [[1, 2, 3]] * 3


def test_ranks_run_one_at_a_time_and_in_the_same_order_every_time() -> None:
    def trace() -> list[tuple[int, int]]:
        steps: list[tuple[int, int]] = []

        def work(group: SimulatedGroup) -> None:
            for step in range(3):
                steps.append((step, group.rank))
                group.all_gather(torch.zeros(1))

        run_simulated(4, work)
        return steps

    assert trace() == trace() == [(step, rank) for step in range(3) for rank in range(4)]


def test_a_simulated_group_is_a_group_and_a_foreign_object_is_none() -> None:
    def look(group: SimulatedGroup) -> tuple[int, int]:
        assert isinstance(group, Group)
        assert is_group(group)
        return group_rank_size(group)

    assert run_simulated(2, look) == [(0, 2), (1, 2)]
    assert not is_group(object())
    assert group_rank_size(None) == (0, 1)


def test_a_failing_rank_ends_the_others_and_is_named_with_its_cause() -> None:
    reached: list[int] = []

    def work(group: SimulatedGroup) -> None:
        if group.rank == 2:
            raise KeyError("weights")
        group.all_gather(torch.zeros(1))
        reached.append(group.rank)

    with pytest.raises(RankError, match=r"rank 2 of 4 failed: KeyError: 'weights'") as caught:
        run_simulated(4, work)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert reached == []


def test_an_input_that_a_rank_refuses_stays_an_input_error_with_the_rank_in_front() -> None:
    def refuse(group: SimulatedGroup) -> None:
        if group.rank == 1:
            raise InputError("a.safetensors has no lm_head.weight")
        group.all_gather(torch.zeros(1))

    with pytest.raises(InputError, match=r"^rank 1 of 2: a.safetensors has no lm_head.weight$"):
        run_simulated(2, refuse)


def test_ranks_that_bring_different_shapes_or_dtypes_are_an_error() -> None:
    with pytest.raises(InputError, match=r"rank 0 brings torch.float32 \[1\], rank 2 .*\[2\]"):
        run_simulated(3, lambda g: g.all_gather(torch.zeros(2 if g.rank == 2 else 1)))
    with pytest.raises(InputError, match=r"rank 1 torch.bfloat16"):
        run_simulated(
            2,
            lambda g: g.all_gather(torch.zeros(1, dtype=[torch.float32, torch.bfloat16][g.rank])),
        )
    with pytest.raises(InputError, match=r"disagree in all_to_all"):
        run_simulated(2, lambda g: g.all_to_all([torch.zeros(g.rank + 1, 3)] * 2))


def test_a_rank_that_ends_while_the_others_wait_is_an_error_and_no_hang() -> None:
    with pytest.raises(InputError, match=r"rank 1 of 3 ended .* all_gather, .* ranks 0, 2 wait"):
        run_simulated(3, lambda g: g.rank == 1 or g.all_gather(torch.zeros(1)))


def test_ranks_in_different_collectives_are_an_error_and_no_hang() -> None:
    def work(group: SimulatedGroup) -> None:
        if group.rank == 0:
            group.all_gather(torch.zeros(1))
        else:
            group.all_to_all([torch.zeros(1)] * 2)

    with pytest.raises(InputError, match=r"rank 0 entered all_gather, rank 1 all_to_all"):
        run_simulated(2, work)


def test_groups_of_a_grid_exchange_apart_from_each_other() -> None:
    def work(everyone: SimulatedGroup) -> list[list[int]]:
        pair = [0, 1] if everyone.rank < 2 else [2, 3]
        group = everyone.among(pair)
        assert (group.rank, group.size) == (everyone.rank % 2, 2)
        # The second pair meets three times, the first once: neither waits for the other.
        rounds = 1 if everyone.rank < 2 else 3
        mine = torch.tensor([everyone.rank])
        found = [[int(t) for t in group.all_gather(mine)] for _ in range(rounds)]
        return [*found, [int(t) for t in everyone.all_gather(mine)]]

    whole = [0, 1, 2, 3]
    assert run_simulated(4, work) == [
        [[0, 1], whole],
        [[0, 1], whole],
        [[2, 3], [2, 3], [2, 3], whole],
        [[2, 3], [2, 3], [2, 3], whole],
    ]


def test_ranks_that_wait_in_groups_that_cannot_both_meet_are_an_error_and_no_hang() -> None:
    def work(everyone: SimulatedGroup) -> None:
        pair = {0: [0, 1], 1: [1, 2], 2: [2, 0]}[everyone.rank]
        everyone.among(pair).all_gather(torch.zeros(1))

    with pytest.raises(InputError, match=r"rank 0 entered all_gather with ranks 0, 1, rank 1 "):
        run_simulated(3, work)


def test_a_message_wider_than_its_receiver_expects_is_an_error() -> None:
    with pytest.raises(InputError, match=r"rank 0 expects 3 columns of rank 0, which sends 2"):
        run_simulated(2, lambda g: g.all_to_all([torch.zeros(2)] * 2, [3, 2]))


def test_a_message_too_few_is_an_error_that_counts_them() -> None:
    with pytest.raises(InputError, match=r"rank 0 has 1 tensor to send in a group of 2"):
        run_simulated(2, lambda g: g.all_to_all([torch.zeros(2)]))


def test_a_rank_that_neither_ends_nor_meets_the_others_ends_the_run_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 of 2 has not ended or entered"):
        run_simulated(2, lambda g: time.sleep(30 if g.rank == 0 else 0), timeout=0.2)
    assert time.monotonic() - started < 10


def test_gradient_mode_is_the_callers() -> None:
    with torch.no_grad():
        assert run_simulated(2, lambda g: torch.is_grad_enabled()) == [False, False]
    assert run_simulated(2, lambda g: torch.is_grad_enabled()) == [True, True]
    with pytest.raises(InputError, match="0 ranks"):
        run_simulated(0, lambda g: None)
