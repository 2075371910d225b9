"""Dumps like those of each framework, without the frameworks.

    cd first-steps                       # what `opdtool demo first-steps` writes
    python ../docs/framework_dumps.py

Takes the hooks out of ``frameworks.md``, gives them what a trainer would, made from the example
data of the working directory, and writes there the dumps that the page checks.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import opdtool
from opdtool.core.geometry import PackGeometry


def main() -> None:
    """Every framework's files, in a folder of its own."""
    batch = load_file("batch.safetensors")
    for name in ("nemo", "verl", "slime", "specforge"):
        Path(name).mkdir(exist_ok=True)
    nemo_rl(batch)
    verl(batch)
    slime(batch)
    specforge(batch)
    payload = load_file("teacher_hidden_prenorm.safetensors")
    hook("teacher").dump_payload(
        "payload",
        payload["teacher_full_hidden_states"],
        payload["opd_full_teacher_index"],
        batch,
    )


def hook(framework: str) -> Any:
    """The page's own functions: the block whose first line is ``# hooks_FRAMEWORK.py``."""
    page = Path(__file__).with_name("frameworks.md").read_text(encoding="utf-8")
    block = re.search(rf"^```python\n(# hooks_{framework}\.py\n.*?)^```$", page, re.M | re.S)
    if block is None:
        raise RuntimeError(f"frameworks.md has no block hooks_{framework}.py")
    names: dict[str, Any] = {}
    exec(block[1], names)
    return SimpleNamespace(**names)


def mask_of(batch: dict[str, Tensor]) -> Tensor:
    """Which real tokens are trained on."""
    real = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    return batch["token_mask"] * real * batch["sample_mask"][:, None]


def segments(batch: dict[str, Tensor], padded: list[int], shift: int) -> Tensor:
    """The rows' masks, each shifted left and in a segment of its padded length, [T]."""
    rows = []
    for row, length, room in zip(
        mask_of(batch), batch["input_lengths"].tolist(), padded, strict=True
    ):
        kept = row[shift:length]
        rows.append(torch.cat([kept, torch.zeros(room - len(kept))]))
    return torch.cat(rows)


def offsets(lengths: list[int]) -> Tensor:
    """Cumulative lengths, from 0."""
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def nemo_rl(batch: dict[str, Tensor]) -> None:
    """Two context-parallel ranks, zig-zag."""
    from opdtool import loss_utils

    hook("nemo_rl").dump_batch("nemo/batch", batch)
    lengths = batch["input_lengths"].tolist()
    layout = PackGeometry(cp_size=2).layout(lengths)
    real, padded = layout.cu_seqlens.tolist(), layout.cu_seqlens_padded.tolist()
    mask = loss_utils.pack_rolled_draft_token_mask(
        batch["token_mask"], batch["sample_mask"], tuple(real), tuple(padded)
    )
    for rank in range(2):
        ids = loss_utils._pack_input_ids(
            batch["input_ids"], torch.tensor(real), torch.tensor(padded), rank, 2
        )
        slots = layout.global_slots(rank)
        hook("nemo_rl").dump_pack(
            "nemo/step10", ids, mask[:, slots], torch.tensor(real), torch.tensor(padded), rank, 2
        )


def verl(batch: dict[str, Tensor]) -> None:
    """Left-padded prompts of 40 columns, right-padded responses; rows with a prompt alone."""
    rows, width = batch["input_ids"].shape
    prompt = 40
    ids = torch.full((rows, prompt + width), 260)
    attention = torch.zeros_like(ids)
    response = torch.zeros(rows, width)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        first = int(mask_of(batch)[row].argmax()) if bool(mask_of(batch)[row].any()) else length
        begin = prompt - min(first, prompt)
        ids[row, begin : begin + length] = batch["input_ids"][row, :length]
        attention[row, begin : begin + length] = 1
        mask = torch.zeros(prompt + width)
        mask[begin : begin + length] = mask_of(batch)[row, :length]
        response[row] = mask[prompt:]
    hook("verl").dump_batch(
        "verl/batch",
        {"input_ids": ids, "attention_mask": attention, "response_mask": response},
    )
    lengths = batch["input_lengths"].tolist()
    opdtool.dump(
        "verl/step10",
        draft_token_mask=segments(
            load_file("verl/batch.safetensors") | {"sample_mask": torch.ones(rows)}, lengths, 0
        )[None],
        cu_seqlens=offsets(lengths),
        cu_seqlens_padded=offsets(lengths),
    )


def slime(batch: dict[str, Tensor]) -> None:
    """Samples as lists; the tail a segment of its own."""
    lengths = batch["input_lengths"].tolist()
    tokens = [ids[:length] for ids, length in zip(batch["input_ids"], lengths, strict=True)]
    masks = [mask[:length] for mask, length in zip(mask_of(batch), lengths, strict=True)]
    cut = [length // 3 for length in lengths]  # where the response begins, or before
    cut = [min(c, int(m.argmax())) if bool(m.any()) else c for c, m in zip(cut, masks, strict=True)]
    hook("slime").dump_batch(
        "slime/batch", tokens, [m[c:] for c, m in zip(cut, masks, strict=True)]
    )
    tail = -sum(lengths) % 128
    packed = torch.cat([segments(batch, lengths, 1), torch.zeros(tail)])
    opdtool.dump("slime/step10", draft_token_mask=packed[None])


def specforge(batch: dict[str, Tensor]) -> None:
    """One sample a torch file; the mask of the second step, shifted twice."""
    row, length = 0, int(batch["input_lengths"][0])
    one = {
        "input_ids": batch["input_ids"][row : row + 1, :length],
        "loss_mask": mask_of(batch)[row : row + 1, :length],
        "hidden_state": torch.zeros(1, length, 8),
    }
    torch.save(one, "specforge/data_0.ckpt")
    mask = torch.cat([one["loss_mask"][:, 2:], torch.zeros(1, 2)], dim=1)
    opdtool.dump(
        "specforge/step1",
        draft_token_mask=mask,
        cu_seqlens=offsets([length]),
        cu_seqlens_padded=offsets([length]),
    )


if __name__ == "__main__":
    main()
