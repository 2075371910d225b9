"""The functions that take a group, on real gloo processes and their bare process groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opdtool.core.divergence import chunked_divergences
from opdtool.core.errors import InputError
from opdtool.core.teacher import reconstruct_opd_full_teacher_logits
from tests.ranks.workers import run_gloo

PAYLOAD = torch.arange(14.0).reshape(1, 7, 2)
LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.0], [3.0, 1.0, -2.0, 0.5]])


def positions(group: Any) -> torch.Tensor:
    return reconstruct_opd_full_teacher_logits(
        PAYLOAD,
        teacher_payload="logits",
        student_logits=torch.empty(1, 4, 2),
        vocab_parallel_rank=0,
        context_parallel_group=group,
    )


def in_a_process() -> dict[str, Any]:
    world: Any = torch.distributed.group.WORLD
    mine = LOGITS[:, 2 * world.rank() : 2 * world.rank() + 2]
    alone = torch.distributed.new_group([1])
    out: dict[str, Any] = {
        "positions": positions(world)[0, :, 0].tolist(),
        "forward": chunked_divergences(
            mine, mine.flip(0), vocab_slice=1, vocab_parallel_group=world
        ).forward.tolist(),
    }
    try:
        out["of rank 1 alone"] = positions(alone).shape
    except InputError as error:
        out["of rank 1 alone"] = str(error)
    return out


def test_a_process_group_is_asked_for_the_place_of_this_process(tmp_path: Path) -> None:
    first, second = run_gloo(2, in_a_process, tmp_path)
    # 7 positions padded to 8, in chunks of two: rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5.
    assert first["positions"] == [0, 2, 12, 0]
    assert second["positions"] == [4, 6, 8, 10]
    p, q = LOGITS.to(torch.float64).log_softmax(-1)
    want = torch.stack([(p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()])
    for found in (first, second):
        torch.testing.assert_close(torch.tensor(found["forward"]), want.float())
    assert "this process is not in context_parallel_group" in first["of rank 1 alone"]
    # Alone it would hold all 7 positions, which are more than its 4.
    assert "the payload has 7 positions, more than" in second["of rank 1 alone"]
