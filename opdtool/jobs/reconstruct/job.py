"""What ``opdtool reconstruct`` was asked to do, as typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from opdtool.core.errors import InputError
from opdtool.core.limits import MOST_SLOTS, check_tolerances
from opdtool.core.teacher import check_multipliable
from opdtool.io.checkpoints import HeadSpec

HIDDEN, LOGITS, INDEX = (
    "teacher_full_hidden_states",
    "teacher_full_logits",
    "opd_full_teacher_index",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconstructJob:
    """All that ``opdtool reconstruct`` was asked to do."""

    payload: Path
    heads: Sequence[HeadSpec] = ()
    norms: Mapping[int, HeadSpec] = field(default_factory=dict)
    norm_eps: float | None = None
    norm_offset: float = 0.0
    output: Path | None = None
    kind: str = "auto"
    tp: int | None = None
    cp: int | None = None
    scale: float | None = None
    softcap: float | None = None
    pad_vocab: int = 1
    student_seq_len: int | None = None
    packed: bool = False
    compute: torch.dtype | None = None
    d2t: Path | None = None
    reference: Sequence[Path] = ()
    student: Sequence[Path] = ()
    logprobs: Path | None = None
    batch: Sequence[Path] = ()
    rtol: float | None = None
    atol: float | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    max_memory: int = 1 << 30
    device: str = "auto"
    ranks: str = "simulated"
    timeout: float = 300.0


def check_options(job: ReconstructJob) -> None:
    """Refuse options that cannot be right whatever the files hold.

    Raises:
        InputError: a number out of its range, or options that do not go together.
    """
    if job.compute is not None:
        check_multipliable("--compute-dtype", job.compute)
    for name, value in (("--logit-scale", job.scale), ("--logit-softcap", job.softcap)):
        if value is not None and not (np.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; it must be a finite number above 0")
    check_tolerances(rtol=job.rtol, atol=job.atol)
    if not job.reference and (job.rtol is not None or job.atol is not None) and not job.logprobs:
        raise InputError("--rtol and --atol are for a comparison: add --reference or --logprobs")
    if job.packed and job.student_seq_len is not None:
        raise InputError(
            "--student-seq-len is for rows of a batch; a pack's length is in its cu_seqlens_padded"
        )
    if (job.student_seq_len or 0) > MOST_SLOTS:
        raise InputError(
            f"--student-seq-len is {job.student_seq_len}, more than int32 can count; correct it"
        )
    if job.pad_vocab > MOST_SLOTS:
        raise InputError(
            f"--pad-vocab-to-multiple-of is {job.pad_vocab}, more than token ids can count; "
            "correct it"
        )
    if job.norm_eps is not None and not (np.isfinite(job.norm_eps) and job.norm_eps >= 0):
        raise InputError(f"--norm-eps is {job.norm_eps}; it must be a finite number of at least 0")
