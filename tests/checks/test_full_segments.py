"""Segments that are full to their last slot are right, whatever the dump says of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opdtool.checks.layout import check_layout
from opdtool.checks.layout_outcome import PackVectors
from opdtool.core.geometry import PackGeometry

LENGTHS = [4, 8, 3]
REAL, PADDED = [0, 4, 12, 15], [0, 4, 12, 16]


@pytest.mark.parametrize("real", [REAL, None])
@pytest.mark.parametrize("padded", [PADDED, None])
def test_a_full_segment_fits(real: list[int] | None, padded: list[int] | None) -> None:
    found = check_layout(
        PackVectors(
            cu_seqlens=None if real is None else torch.tensor(real, dtype=torch.int32),
            cu_seqlens_padded=None if padded is None else torch.tensor(padded, dtype=torch.int32),
            sequence_index=None,
            lengths=np.array(LENGTHS, dtype=np.int64),
            geometry=PackGeometry(cp_size=2),
            slots=16,
            whole=True,
        )
    )
    assert found.findings
    assert [each for each in found.findings if each.status == "fail"] == []
    if padded is not None:
        fits = [each.status for each in found.findings if each.code == "OPD105"]
        assert fits == ["pass"]
