"""The names and signatures of ``nemo_rl.algorithms.loss.utils``, each one line onto the core.

``from opdtool.loss_utils import ...`` can stand where that module is imported.
"""

from opdtool.core.masks import pack_rolled_draft_token_mask
from opdtool.core.metrics import MetricNormalizer, rescale_loss_metrics
from opdtool.core.packing import pack_input_ids as _pack_input_ids
from opdtool.core.packing import roll_packed_seq_dim
from opdtool.core.teacher import (
    project_hidden_states_per_teacher as _project_hidden_states_per_teacher,
)
from opdtool.core.teacher import reconstruct_opd_full_teacher_logits
from opdtool.core.vocab import map_teacher_logits_to_draft_vocab

__all__ = [
    "MetricNormalizer",
    "_pack_input_ids",
    "_project_hidden_states_per_teacher",
    "map_teacher_logits_to_draft_vocab",
    "pack_rolled_draft_token_mask",
    "reconstruct_opd_full_teacher_logits",
    "rescale_loss_metrics",
    "roll_packed_seq_dim",
]
