"""Every command that handles data, beside the shortest script that does the same in memory.

The plain way loads whole files with safetensors, does the work in a few lines of torch and saves
what it made: no checks, no reports, no hashes, no manifest, no bound on memory. Each command runs
on a quarter of the data and on all of it, so that the growth of its time is seen in one run: the
start of the interpreter and of torch is taken off first. A check that fails, and says why, stands
beside the same one that passes. ``simulate`` is left out: its work is that of the others.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.harness import Row, Run, main, run
from opdtool.io.writer import save_tensors

WIDTH = 1024
ROWS = {"small": 512, "middle": 4096, "large": 16384}
VOCAB, DRAFT, HIDDEN = 32_000, 8_000, 512
REPEATS = 3
LEAST = 0.05
"""Seconds beyond the start below which a growth would be that of noise."""

HEAD = """
import sys, torch
from safetensors.torch import load_file, save_file
d = sys.argv[1] + "/"
def offsets(lengths):
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
"""
BATCH = """
b = load_file(d + "batch.safetensors")
n = b["input_lengths"]
real = torch.arange(b["input_ids"].shape[1]) < n[:, None]
ends = n.cumsum(0) - 1
def rolled(packed):
    out = packed.roll(-1)
    out[ends] = 0
    return out
"""
MASK = """
mask = rolled((b["token_mask"] * b["sample_mask"][:, None])[real])[None]
"""
PACK = """
made = {k: b[k][real][None] for k in ("input_ids", "token_mask")}
made["target_ids"] = made["input_ids"].roll(-1, 1)
made["target_ids"][0, ends] = made["input_ids"][0, offsets(n)[:-1]]
made["draft_token_mask"] = mask
made["cu_seqlens"] = made["cu_seqlens_padded"] = offsets(n).int()
"""
LOGITS = """
x = load_file(d + "hidden.safetensors")["teacher_full_hidden_states"]
w = load_file(d + "head.safetensors")["lm_head.weight"]
logits = x @ w.T
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A command, and the script that is its plain way; a word of the command is a file made
    beforehand where it has an ending."""

    name: str
    argv: tuple[str, ...]
    plain: str
    status: int = 0
    fault: str | None = None
    """What a failing check must say that it is; none where nothing of a known kind is wrong."""
    beside: str = ""
    """The passing case that a failing one is measured against."""


def cases() -> list[Case]:
    """The commands in an order in which each finds what it reads."""
    save = 'save_file({k: v.clone() for k, v in made.items()}, d + "plain.safetensors")\n'
    loaded = 'p = load_file(d + "packs/pack-00000.safetensors")\n'
    reference = 'r = load_file(d + "logits.safetensors")["teacher_full_logits"]\n'
    ids = 'd2t = load_file(d + "d2t.safetensors")["d2t"]\nids = torch.arange(len(d2t)) + d2t\n'
    reconstruct = ("reconstruct", "hidden.safetensors", "--head", "head.safetensors")
    verify_pack = ("--batch", "batch.safetensors")
    return [
        Case("pack", ("pack", "batch.safetensors", "-o", "packs"), BATCH + MASK + PACK + save),
        Case(
            "unpack",
            ("unpack", "packs", "-o", "back.safetensors"),
            loaded
            + "at = offsets(p['cu_seqlens'].diff().long())\n"
            + f"real = torch.arange({WIDTH}) < at.diff()[:, None]\n"
            + "made = {k: torch.zeros(real.shape, dtype=p[k].dtype) for k in "
            + "('input_ids', 'token_mask')}\n"
            + "for k, v in made.items():\n    v[real] = p[k][0]\n"
            + save,
        ),
        Case(
            "verify-pack",
            ("verify-pack", "packs", *verify_pack),
            BATCH + MASK + PACK + loaded + "assert all(torch.equal(p[k], made[k]) for k in made)\n",
        ),
        Case(
            "verify-pack, one slot wrong",
            ("verify-pack", "one.safetensors", *verify_pack),
            "",
            status=1,
            beside="verify-pack",
        ),
        Case(
            "verify-pack, targets not shifted",
            ("verify-pack", "unshifted.safetensors", *verify_pack),
            "",
            status=1,
            fault="targets-not-shifted",
            beside="verify-pack",
        ),
        Case(
            "build-mask",
            ("build-mask", "batch.safetensors", "-o", "mask.safetensors"),
            BATCH + MASK + "made = {'draft_token_mask': mask}\n" + save,
        ),
        Case(
            "verify-mask",
            ("verify-mask", "mask.safetensors", *verify_pack),
            BATCH
            + MASK
            + 'found = load_file(d + "mask.safetensors")["draft_token_mask"]\n'
            + "assert torch.equal(found, mask)\n",
        ),
        Case(
            "build-d2t",
            (
                *("build-d2t", "batch.safetensors", "--vocab-size", str(VOCAB)),
                *("--draft-vocab-size", str(DRAFT), "-o", "d2t.safetensors"),
            ),
            BATCH
            + "kept = (b['token_mask'] * b['sample_mask'][:, None] > 0) & real\n"
            + f"counts = torch.bincount(b['input_ids'][kept], minlength={VOCAB})\n"
            + f"top = counts.argsort(descending=True, stable=True)[:{DRAFT}].sort().values\n"
            + "made = {'d2t': top - torch.arange(len(top))}\n"
            + save,
        ),
        Case(
            "verify-d2t",
            (
                *("verify-d2t", "d2t.safetensors", "--vocab-size", str(VOCAB)),
                *("--batch", "batch.safetensors"),
            ),
            BATCH
            + ids
            + "kept = (b['token_mask'] * b['sample_mask'][:, None] > 0) & real\n"
            + f"assert ids.min() >= 0 and ids.max() < {VOCAB} and len(ids.unique()) == len(ids)\n"
            + "print(torch.isin(b['input_ids'][kept], ids).float().mean())\n",
        ),
        Case(
            "reconstruct",
            (*reconstruct, "-o", "rebuilt"),
            LOGITS + "made = {'teacher_logits': logits}\n" + save,
        ),
        Case(
            "reconstruct --reference",
            (*reconstruct, "--reference", "logits.safetensors"),
            LOGITS
            + reference
            + "assert torch.allclose(logits.float(), r.float(), rtol=1e-2, atol=1e-2)\n"
            + "p, q = r.float().log_softmax(-1), logits.float().log_softmax(-1)\n"
            + "print((p.exp() * (p - q)).sum(-1).mean(), (r.argmax(-1) == "
            + "logits.argmax(-1)).float().mean())\n",
        ),
        Case(
            "reconstruct --reference, one wrong",
            (*reconstruct, "--reference", "logits-one.safetensors"),
            "",
            status=1,
            beside="reconstruct --reference",
        ),
        Case(
            "reconstruct --reference, shifted",
            (*reconstruct, "--reference", "logits-shifted.safetensors"),
            "",
            status=1,
            fault="sequence-shifted",
            beside="reconstruct --reference",
        ),
        Case(
            "map-d2t",
            ("map-d2t", "logits.safetensors", "--d2t", "d2t.safetensors", "-o", "m.safetensors"),
            ids + reference + "made = {'teacher_logits': r[..., ids].contiguous()}\n" + save,
        ),
        Case(
            "inspect",
            ("inspect", "batch.safetensors"),
            'b = load_file(d + "batch.safetensors")\nfor k, v in b.items():\n    w = v.double()\n'
            "    print(k, w.isnan().sum(), w.isinf().sum(), w.min(), w.max(), w.mean())\n",
        ),
        Case(
            "compare",
            ("compare", "batch.safetensors", "copy.safetensors"),
            'a, b = load_file(d + "batch.safetensors"), load_file(d + "copy.safetensors")\n'
            "assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)\n",
        ),
        Case(
            "roll",
            (
                *("roll", "packs/pack-00000.safetensors", "--name", "input_ids"),
                *("-o", "rolled.safetensors"),
            ),
            loaded
            + "out = p['input_ids'].roll(-1, 1)\n"
            + "out[:, p['cu_seqlens_padded'][1:].long() - 1] = 0\n"
            + "made = {'input_ids': out}\n"
            + save,
        ),
        Case(
            "convert",
            ("convert", "batch.pt", "-o", "converted.safetensors"),
            'made = torch.load(d + "batch.pt", weights_only=True)\n' + save,
        ),
    ]


def rows(scale: str) -> list[Row]:
    """Per command: its time beside the plain way's, its growth, and its memory."""
    count = ROWS[scale]
    bare = least([run([sys.executable, "-c", "import torch"]) for _ in range(REPEATS)])
    quarter, whole = measured(max(count // 4, 2)), measured(count)
    return [row for case in cases() for row in rows_of(case, count, quarter, whole, bare)]


Pairs = Mapping[str, tuple[Run, Run | None]]


def rows_of(case: Case, count: int, quarter: Pairs, whole: Pairs, bare: Run) -> list[Row]:
    """The lines of one command, out of what was measured."""
    size = f"{count} x {WIDTH}"
    ours, plain = whole[case.name]
    wall = beyond(ours, bare)
    if plain is None:
        passing = beyond(whole[case.beside][0], bare)
        failing = Row(
            name=case.name,
            size=size,
            ours=wall,
            plain=passing,
            ratio=wall / passing,
            goal="<= 2 of passing",
            reached=wall <= 2 * passing,
            work=count,
        )
        return [failing]
    before = beyond(quarter[case.name][0], bare)
    told = before > LEAST
    memory, plain_memory = (max(one.peak_rss - bare.peak_rss, 1) for one in (ours, plain))
    return [
        Row(
            name=case.name,
            size=size,
            ours=wall,
            plain=beyond(plain, bare),
            ratio=wall / beyond(plain, bare),
            work=count,
        ),
        Row(
            name=f"{case.name}, beside four quarters",
            size=size,
            ours=wall,
            plain=4 * before,
            ratio=wall / (4 * before),
            goal="<= 1.2" if told else "",
            reached=wall <= 1.2 * 4 * before if told else None,
        ),
        Row(
            name=f"{case.name}, memory above torch",
            size=size,
            ours=memory,
            plain=plain_memory,
            ratio=memory / plain_memory,
            unit="B",
        ),
    ]


def beyond(done: Run, bare: Run) -> float:
    """Seconds past the start of an interpreter with torch."""
    return max(done.wall - bare.wall, 1e-3)


def least(runs: Sequence[Run]) -> Run:
    """The fastest of several runs, with the greatest memory of them all."""
    fastest = min(runs, key=lambda one: one.wall)
    return Run(
        returncode=fastest.returncode,
        wall=fastest.wall,
        cpu=fastest.cpu,
        peak_rss=max(one.peak_rss for one in runs),
        output=fastest.output,
    )


def measured(count: int) -> Pairs:
    """By case, ours and the plain way on ``count`` rows, taking turns."""
    found: dict[str, tuple[Run, Run | None]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, count)
        for case in cases():
            if case.status:
                spoil(folder)
            ours, plain = [], []
            for _ in range(REPEATS):
                ours.append(own(case, folder))
                if case.plain:
                    script = HEAD + case.plain
                    plain.append(held(run([sys.executable, "-c", script, folder]), 0))
            found[case.name] = (least(ours), least(plain) if plain else None)
    return found


PLACES = ("packs", "rebuilt")
"""Words of a command that name a directory."""


def own(case: Case, folder: Path) -> Run:
    """The command itself, which must end as it should; what it wrote before is taken away."""
    words = [folder / word if "." in word or word in PLACES else word for word in case.argv]
    if "-o" in case.argv:
        out = folder / case.argv[case.argv.index("-o") + 1]
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    told = ["--format", "json"] if case.status else ["-q"]
    if case.argv[0] in ("convert", "build-mask", "roll", "unpack"):
        told = ["-q"]
    done = held(run([sys.executable, "-m", "opdtool", *words, *told]), case.status)
    if case.status:
        named = [entry["fault"] for entry in json.loads(done.output)["diagnosis"]]
        assert named[:1] == ([case.fault] if case.fault else []), named
    return done


def held(done: Run, status: int) -> Run:
    """A run that ended with this status."""
    assert done.returncode == status, done.output
    return done


def make(folder: Path, count: int) -> None:
    """A batch and a copy of it, hidden states with a head, and the logits they make."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(WIDTH // 4, WIDTH + 1, count)
    real = np.arange(WIDTH) < lengths[:, None]
    batch = {
        "input_ids": torch.from_numpy(rng.integers(1, VOCAB, (count, WIDTH)) * real),
        "input_lengths": torch.from_numpy(lengths),
        "token_mask": torch.from_numpy((rng.random((count, WIDTH)) < 0.7) & real).float(),
        "sample_mask": torch.ones(count),
    }
    for name in ("batch.safetensors", "copy.safetensors"):
        save_tensors(folder / name, batch)
    torch.save(batch, folder / "batch.pt")
    torch.manual_seed(0)
    positions = max(count // 128, 2)
    hidden = torch.randn(2, positions, HIDDEN).bfloat16()
    head = (torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).bfloat16()
    logits = (hidden.float() @ head.float().T).bfloat16()
    save_tensors(folder / "hidden.safetensors", {"teacher_full_hidden_states": hidden})
    save_tensors(folder / "head.safetensors", {"lm_head.weight": head})
    save_tensors(folder / "logits.safetensors", {"teacher_full_logits": logits})
    one = logits.clone()
    one[0, -1, 7] += 5
    save_tensors(folder / "logits-one.safetensors", {"teacher_full_logits": one})
    moved = {"teacher_full_logits": logits.roll(1, dims=1)}
    save_tensors(folder / "logits-shifted.safetensors", moved)


def spoil(folder: Path) -> None:
    """Packs with a mistake in them, out of the right one that is there."""
    if (folder / "one.safetensors").exists():
        return
    pack = load_file(folder / "packs" / "pack-00000.safetensors")
    pack["target_ids"] = pack["target_ids"].clone()
    changes: dict[str, Callable[[], torch.Tensor]] = {
        "unshifted": lambda: pack["input_ids"],
        "one": lambda: pack["target_ids"].index_fill(1, torch.tensor([3]), VOCAB - 1),
    }
    for name, change in changes.items():
        save_tensors(folder / f"{name}.safetensors", pack | {"target_ids": change()})


if __name__ == "__main__":
    main(rows, __doc__ or "")
