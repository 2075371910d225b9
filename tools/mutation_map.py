"""Which tests speak for which module; quick and direct ones first."""

from __future__ import annotations

_PACKING = (
    "tests/core/test_layout.py",
    "tests/core/test_packing.py",
    "tests/core/test_packing_edges.py",
    "tests/core/test_masks.py",
    "tests/properties/test_packing.py",
)
_BINNING = ("tests/core/test_binning.py", "tests/properties/test_binning.py")
_PLAN = ("tests/core/test_plan.py", "tests/properties/test_plan.py")
_VOCAB = ("tests/core/test_vocab.py", "tests/core/test_vocab_ranks.py")
_DRAFT = (
    "tests/checks/test_vocab_figures.py",
    "tests/checks/test_vocab.py",
    "tests/cli/test_verify_d2t.py",
)
_LAYOUT = (
    "tests/checks/test_layout_direct.py",
    "tests/checks/test_layout.py",
    "tests/checks/test_layout_tails.py",
    "tests/checks/test_full_segments.py",
)
_MASKS = ("tests/checks/test_masks.py", "tests/cli/test_verify_mask.py")
_CONTENT = ("tests/checks/test_content.py", "tests/cli/test_verify_pack.py")
_TEACHER = (
    "tests/checks/test_teacher.py",
    "tests/checks/test_teacher_search.py",
    "tests/cli/test_reconstruct.py",
)
_RANKS = ("tests/checks/test_ranks_direct.py", "tests/cli/test_simulate.py")
_SMALL = "tests/checks/test_small_direct.py"

UNMAPPED = frozenset({"core/errors", "checks/registry"})
"""Modules that state what there is and decide nothing."""

TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("core/offsets", ("tests/core/test_offsets.py", *_PACKING)),
    ("core/layout", _PACKING),
    ("core/geometry", _PACKING),
    ("core/packing", ("tests/core/test_packing_edges.py", *_PACKING)),
    ("core/masks", ("tests/core/test_masks.py", "tests/core/test_packing_edges.py")),
    ("core/metrics", ("tests/core/test_metrics.py",)),
    ("core/plan", _PLAN),
    ("core/binning", _BINNING),
    ("core/binning_arrival", _BINNING),
    ("core/binning_classes", _BINNING),
    ("core/binning_spread", _BINNING),
    ("core/counting", ("tests/core/test_counting.py",)),
    ("core/vocab", _VOCAB),
    ("core/exchange", _VOCAB[::-1]),
    ("core/teacher", ("tests/core/test_teacher.py",)),
    ("core/rebuild", ("tests/core/test_rebuild.py", "tests/cli/test_reconstruct.py")),
    ("core/divergence", ("tests/core/test_divergence.py",)),
    ("core/scores", ("tests/core/test_scores.py",)),
    ("core/group", ("tests/core/test_refusals.py", "tests/core/test_vocab_ranks.py")),
    ("core/limits", ("tests/core/test_limits.py",)),
    ("core/words", ("tests/core/test_words.py",)),
    ("core/bounds", ("tests/core/test_bounds.py", "tests/core/test_compare.py")),
    ("core/compare", ("tests/core/test_compare_edges.py", "tests/core/test_compare.py")),
    ("checks/canonical", ("tests/checks/test_canonical.py",)),
    ("checks/places", (_SMALL,)),
    ("checks/room", (_SMALL,)),
    ("checks/strips", _MASKS),
    ("checks/compare", ("tests/checks/test_compare.py", "tests/cli/test_compare.py")),
    ("checks/inspect", ("tests/checks/test_inspect.py", "tests/cli/test_inspect.py")),
    ("checks/vocab", _DRAFT),
    ("checks/vocab_case", _DRAFT),
    ("checks/vocab_faults", _DRAFT),
    ("checks/vocab_fit", _DRAFT),
    ("checks/vocab_ids", ("tests/checks/test_vocab_ids.py", *_DRAFT)),
    (
        "checks/vocab_logits",
        (
            _SMALL,
            "tests/cli/test_map_d2t.py",
        ),
    ),
    ("checks/layout", _LAYOUT),
    ("checks/layout_lengths", _LAYOUT),
    ("checks/layout_multiples", _LAYOUT),
    ("checks/layout_outcome", _LAYOUT),
    ("checks/masks", _MASKS),
    ("checks/masks_findings", ("tests/checks/test_masks_findings_direct.py",)),
    ("checks/masks_sample", ("tests/checks/test_masks_sample_direct.py",)),
    ("checks/masks_verdict", ("tests/checks/test_masks_verdict_direct.py",)),
    ("checks/faults_masks", ("tests/checks/test_faults_direct.py",)),
    ("checks/faults_places", ("tests/checks/test_faults_direct.py",)),
    ("checks/faults_search", ("tests/checks/test_faults_search_direct.py",)),
    ("checks/diagnose", ("tests/checks/test_diagnose_direct.py",)),
    ("checks/hypotheses", ("tests/checks/test_hypotheses_direct.py",)),
    ("checks/recipes", ("tests/checks/test_recipes_direct.py",)),
    ("checks/recipes_values", ("tests/checks/test_recipes_values_direct.py",)),
    ("checks/content", ("tests/checks/test_content_direct.py",)),
    ("checks/content_verdict", _CONTENT),
    ("checks/faults_content", ("tests/checks/test_faults_direct.py",)),
    ("checks/teacher", _TEACHER),
    ("checks/teacher_evidence", _TEACHER),
    ("checks/faults_teacher", _TEACHER),
    ("checks/faults_teacher_search", _TEACHER[1:]),
    ("checks/faults_teacher_proposals", _TEACHER),
    ("checks/faults_teacher_sample", _TEACHER),
    ("checks/faults_teacher_shifts", _TEACHER),
    ("checks/ranks", _RANKS),
    ("checks/ranks_cases", _RANKS[:1]),
    ("checks/ranks_judge", _RANKS),
    ("checks/ranks_verdicts", _RANKS[:1]),
    ("checks/ranks_reference", _RANKS[:1]),
)
