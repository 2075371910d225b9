"""Random small teachers, and what each known fault makes of their logits, written to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from opdtool.findings import Report
from opdtool.io.checkpoints import HeadSpec
from opdtool.jobs.reconstruct.job import ReconstructJob

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Case:
    """A payload, its teachers, and what a right trainer records, all small and random."""

    where: Path
    B: int
    S: int
    H: int
    V: int
    tp: int
    cp: int
    dtype: torch.dtype
    reference_dtype: torch.dtype
    hidden: Tensor
    heads: dict[int, Tensor]
    norms: dict[int, Tensor]
    index: Tensor
    options: dict[str, object] = field(default_factory=dict)
    d2t: Tensor | None = None

    @property
    def padded(self) -> int:
        multiple = 2 * self.cp if self.cp > 1 else 1
        return -(-self.S // multiple) * multiple

    def logits(
        self, hidden: Tensor | None = None, routes: Tensor | None = None, dtype: object = None
    ) -> Tensor:
        """[B, S, V] float32, before any rounding of the reference."""
        hidden = self.hidden if hidden is None else hidden
        routes = self.index if routes is None else routes
        rows = [
            hidden[b].to(self.dtype).float() @ self.heads[int(routes[b])].float().t()
            for b in range(self.B)
        ]
        return torch.stack(rows)

    def norm(self, hidden: Tensor, b: int) -> Tensor:
        """Llama's norm: rounded to the dtype before and after the weight."""
        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return (x.to(self.dtype) * self.norms[int(self.index[b])]).to(self.dtype)

    def normed(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.norm(hidden[b], b) for b in range(self.B)])


def make_case(where: Path, seed: int) -> Case:
    made = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=made))]

    B, S, H = pick(1, 2, 3, 5), pick(7, 12, 16, 33), pick(8, 24, 64)
    V = pick(48, 96, 128, 480)
    dtype = DTYPES[pick(0, 1, 2)]
    reference_dtype = (dtype, torch.float32, torch.bfloat16)[pick(0, 1, 2)]
    teachers = sorted({pick(0, 1, 2, 3), pick(4, 5, 6)})
    heads = {t: (torch.randn(V, H, generator=made) * 0.3).to(dtype) for t in teachers}
    norms = {t: (1 + 0.4 * torch.randn(H, generator=made)).to(dtype) for t in teachers}
    index = torch.tensor([teachers[pick(0, 1)] for _ in range(B)])
    index[0] = teachers[0]
    if B > 1:
        index[1] = teachers[1]
    hidden = (torch.randn(B, S, H, generator=made) * 2).to(dtype)
    return Case(
        where,
        B,
        S,
        H,
        V,
        pick(1, 2, 4),
        pick(1, 2, 4),
        dtype,
        reference_dtype,
        hidden,
        heads,
        norms,
        index,
    )


def write(case: Case, reference: Tensor | list[list[Tensor]]) -> ReconstructJob:
    """Files of a case: payload, checkpoints with norms beside heads, reference or its shards."""
    where = case.where
    where.mkdir(parents=True, exist_ok=True)
    for old in where.glob("*.safetensors"):
        old.unlink()
    save_file(
        {
            "teacher_full_hidden_states": case.hidden.contiguous(),
            "opd_full_teacher_index": case.index,
        },
        where / "payload.safetensors",
    )
    specs = []
    for t, head in case.heads.items():
        folder = where / f"teacher-{t}"
        folder.mkdir(exist_ok=True)
        save_file(
            {"lm_head.weight": head.contiguous(), "model.norm.weight": case.norms[t]},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-6}))
        specs.append(HeadSpec(t, folder, None))
    options = dict(case.options)
    if case.d2t is not None:
        save_file({"d2t": case.d2t}, where / "d2t.safetensors")
        options["d2t"] = where / "d2t.safetensors"
    if isinstance(reference, Tensor):
        path = where / "reference.safetensors"
        stored = reference.to(case.reference_dtype).contiguous()
        save_file({"teacher_full_logits": stored}, path)
        paths = [path]
    else:
        paths = []
        for t, row in enumerate(reference):
            for c, shard in enumerate(row):
                name = f"r.tp{t}of{len(reference)}.cp{c}of{len(row)}.safetensors"
                stored = shard.to(case.reference_dtype).contiguous()
                save_file({"teacher_logits": stored}, where / name)
                paths.append(where / name)
    return ReconstructJob(
        payload=where / "payload.safetensors",
        heads=specs,
        reference=paths,
        tp=case.tp,
        cp=case.cp,
        max_memory=1 << 24,
        device="cpu",
        **options,  # type: ignore[arg-type]
    )


def shards(case: Case, logits: Tensor, order: Callable[[int], list[int]]) -> list[list[Tensor]]:
    """Shards of logits [B, S, V]: ``order(r)`` lists the positions of CP rank r."""
    full = torch.zeros(case.B, case.padded, case.V)
    full[:, : case.S] = logits
    width = case.V // case.tp
    return [
        [full[:, order(r), t * width : (t + 1) * width] for r in range(case.cp)]
        for t in range(case.tp)
    ]


def zigzag(case: Case) -> Callable[[int], list[int]]:
    def order(rank: int) -> list[int]:
        if case.cp == 1:
            return list(range(case.padded))
        chunk = case.padded // (2 * case.cp)
        last = 2 * case.cp - 1 - rank
        return [
            *range(rank * chunk, (rank + 1) * chunk),
            *range(last * chunk, (last + 1) * chunk),
        ]

    return order


Recorded = Tensor | list[list[Tensor]]
"""A reference: whole, or a shard of each tensor- and context-parallel rank."""
Fault = Callable[[Case], "tuple[Case, Recorded, str] | None"]


def window_shifted(case: Case) -> tuple[Case, Tensor, str]:
    shift = 1 + case.B
    return case, case.logits().roll(-shift, -1), f"j{shift:+d}"


def window_shifted_back(case: Case) -> tuple[Case, Tensor, str]:
    full = case.logits().roll(3, -1)
    full[..., :3] = torch.randn(case.B, case.S, 3, generator=torch.Generator().manual_seed(1))
    return case, full, "j-3"


def window_of_next_rank(case: Case) -> tuple[Case, list[list[Tensor]], str] | None:
    if case.tp == 1:
        return None
    right = shards(case, case.logits(), zigzag(case))
    return case, [right[(t + 1) % case.tp] for t in range(case.tp)], "+1 tensor-parallel ranks"


def transposed(case: Case) -> tuple[Case, Tensor, str]:
    made = torch.Generator().manual_seed(5)
    square = {
        t: (torch.randn(case.H, case.H, generator=made) * 0.3).to(case.dtype) for t in case.heads
    }
    case = replace(case, heads=square, V=case.H)
    turned = replace(case, heads={t: w.t() for t, w in square.items()})
    return case, turned.logits(), "hidden @ weight"


def single_head(case: Case) -> tuple[Case, Tensor, str] | None:
    if case.B == 1:
        return None
    only = max(case.heads)
    return case, case.logits(routes=torch.full_like(case.index, only)), f"teacher {only}"


def misrouted(case: Case) -> tuple[Case, Tensor, str] | None:
    if case.B == 1:
        return None
    low, high = sorted(case.heads)
    routes = torch.where(case.index == low, high, low)
    return case, case.logits(routes=routes), f"{low} -> {high}, {high} -> {low}"


def index_not_permuted(case: Case) -> tuple[Case, Tensor, str] | None:
    if case.B < 3:
        return None
    routes = case.index.roll(1)
    tags = {t: set(routes[case.index == t].tolist()) for t in case.index.tolist()}
    if all(len(found) == 1 for found in tags.values()):
        return None  # a mapping of teachers, which another fault makes
    return case, case.logits(routes=routes), "row "


def sequence_shifted(case: Case) -> tuple[Case, Tensor, str]:
    return case, case.logits().roll(-1, 1), "p+1"


def sequence_shifted_back(case: Case) -> tuple[Case, Tensor, str]:
    full = case.logits().roll(2, 1)
    full[:, :2] = 0
    return case, full, "p-2"


def scaled(case: Case) -> tuple[Case, Tensor, str]:
    return case, case.logits() / 0.7, "1.42857"


def capped(case: Case) -> tuple[Case, Tensor, str]:
    cap = 5.0
    return case, cap * (case.logits() / cap).tanh(), "a cap of 5"


def log_probs(case: Case) -> tuple[Case, Tensor, str]:
    return case, case.logits().log_softmax(-1), "log-probabilities"


def norm_missing(case: Case) -> tuple[Case, Tensor, str]:
    return case, case.logits(case.normed(case.hidden)), "pass --norm"


def norm_twice(case: Case) -> tuple[Case, Tensor, str]:
    once = case.normed(case.hidden)
    case = replace(case, hidden=once)
    return case, case.logits(case.normed(once)), "normed it once more"


def norm_twice_by_us(case: Case) -> tuple[Case, Tensor, str]:
    norms = {t: HeadSpec(t, case.where / f"teacher-{t}", None) for t in case.heads}
    return replace(case, options={"norms": norms}), case.logits(), "--norm norms it again"


def padded_wider(case: Case) -> tuple[Case, Tensor, str]:
    extra = torch.zeros(case.B, case.S, 16)
    return (
        replace(case, tp=1),
        torch.cat([case.logits(), extra], -1),
        (f"columns {case.V}..{case.V + 15}"),
    )


def padded_masked(case: Case) -> tuple[Case, Tensor, str]:
    full = case.logits()
    full[..., -9:] = -torch.inf
    return case, full, f"columns {case.V - 9}..{case.V - 1}"


def uneven(case: Case) -> tuple[Case, list[list[Tensor]], str] | None:
    if case.tp == 1:
        return None
    full = torch.zeros(case.B, case.padded, case.V)
    full[:, : case.S] = case.logits()
    width = case.V // case.tp
    edges = [0, *(t * width + 5 for t in range(1, case.tp)), case.V]
    order = zigzag(case)
    parts = [
        [full[:, order(r), edges[t] : edges[t + 1]] for r in range(case.cp)] for t in range(case.tp)
    ]
    return case, parts, "not equal windows"


def contiguous(case: Case) -> tuple[Case, list[list[Tensor]], str] | None:
    if case.cp == 1:
        return None
    local = case.padded // case.cp
    order = lambda r: list(range(r * local, (r + 1) * local))  # noqa: E731
    return case, shards(case, case.logits(), order), "contiguous"


def swapped(case: Case) -> tuple[Case, list[list[Tensor]], str] | None:
    if case.cp == 1:
        return None
    right = zigzag(case)
    order = lambda r: right((r + 1) % case.cp)  # noqa: E731
    return case, shards(case, case.logits(), order), "rank 0 holds rank 1's"


FAULTS: dict[str, tuple[str, Fault]] = {
    "window +k": ("vocab-window-shifted", window_shifted),
    "window -3": ("vocab-window-shifted", window_shifted_back),
    "window of the next rank": ("vocab-window-shifted", window_of_next_rank),
    "transposed": ("head-transposed", transposed),
    "single head": ("single-head-for-all", single_head),
    "misrouted": ("teachers-misrouted", misrouted),
    "index not permuted": ("teachers-misrouted", index_not_permuted),
    "sequence +1": ("sequence-shifted", sequence_shifted),
    "sequence -2": ("sequence-shifted", sequence_shifted_back),
    "scaled": ("logits-scaled", scaled),
    "softcapped": ("logits-softcapped", capped),
    "log-probabilities": ("log-probs-not-logits", log_probs),
    "norm missing": ("norm-missing", norm_missing),
    "norm twice": ("norm-applied-twice", norm_twice),
    "norm twice by --norm": ("norm-applied-twice", norm_twice_by_us),
    "padded wider": ("vocab-padded", padded_wider),
    "padding masked": ("vocab-padded", padded_masked),
    "uneven shards": ("tp-shards-uneven", uneven),
    "cp contiguous": ("cp-contiguous", contiguous),
    "cp swapped": ("cp-rank-swapped", swapped),
}


def right(case: Case) -> list[list[Tensor]]:
    return shards(case, case.logits(), zigzag(case))


def differs(case: Case, reference: Tensor | list[list[Tensor]]) -> bool:
    """Whether the reference really is not what a right trainer records."""
    if isinstance(reference, Tensor):
        good = case.logits()
        return good.shape != reference.shape or not torch.allclose(good, reference, rtol=0.03)
    for own, theirs in zip(right(case), reference, strict=True):
        for a, b in zip(own, theirs, strict=True):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=0.03):
                return True
    return False


def names(report: Report) -> list[str]:
    return [found.fault for found in report.diagnosis]
