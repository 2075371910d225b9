"""opdtool: prepare and verify the data of on-policy distillation and draft-model training.

Public names are imported on first use (PEP 562), so that ``import opdtool`` does not import
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "opdtool.core.binning": ("Bins", "pack_bins"),
    "opdtool.core.bounds": ("ErrorBound", "derived_bound", "given_bound"),
    "opdtool.core.divergence": ("Divergences", "DivergenceSums", "chunked_divergences"),
    "opdtool.core.errors": ("InputError",),
    "opdtool.core.geometry": ("PackGeometry",),
    "opdtool.core.group": ("Group",),
    "opdtool.core.layout": ("PackedLayout",),
    "opdtool.core.offsets": ("cp_window",),
    "opdtool.core.masks": ("draft_token_mask", "pack_rolled_draft_token_mask"),
    "opdtool.core.metrics": ("MetricNormalizer", "rescale_loss_metrics"),
    "opdtool.core.packing": (
        "gather_cp",
        "pack_input_ids",
        "pack_positions",
        "pack",
        "roll_packed_seq_dim",
        "unpack",
    ),
    "opdtool.core.plan": ("BinOptions", "PackPlan", "plan_packs", "utilisation"),
    "opdtool.core.teacher": (
        "project_hidden_states_per_teacher",
        "reconstruct_opd_full_teacher_logits",
        "rms_norm",
    ),
    "opdtool.core.vocab": (
        "choose_draft_vocab",
        "coverage",
        "d2t_from_ids",
        "ids_from_d2t",
        "map_teacher_logits_to_draft_vocab",
        "t2d_from_d2t",
        "t2d_from_ids",
    ),
    "opdtool.io.dump": ("dump",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'opdtool' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_MODULE_OF))
