"""Which tests speak for which module; quick and direct ones first."""

from __future__ import annotations

_PACKING = (
    "tests/core/test_layout.py",
    "tests/core/test_packing.py",
    "tests/core/test_packing_edges.py",
    "tests/core/test_masks.py",
    "tests/properties/test_packing.py",
)

TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("core/offsets", ("tests/core/test_offsets.py", *_PACKING)),
    ("core/layout", _PACKING),
    ("core/packing", ("tests/core/test_packing_edges.py", *_PACKING)),
    ("core/masks", ("tests/core/test_masks.py", "tests/core/test_packing_edges.py")),
    ("core/metrics", ("tests/core/test_metrics.py",)),
    ("core/plan", ("tests/core/test_plan.py", "tests/cli/test_pack.py")),
)
