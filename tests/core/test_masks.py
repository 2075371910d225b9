"""The draft-loss mask against hand-worked arrays and the slow reference."""

from __future__ import annotations

import pytest
import torch

from opdtool.core.layout import PackedLayout
from opdtool.core.masks import draft_token_mask, pack_rolled_draft_token_mask

TOKEN_MASK = torch.tensor([[1.0, 0, 1, 1, 1, 9], [0, 0, 1, 9, 9, 9]])


def test_slot_t_holds_the_weight_of_token_t_plus_one() -> None:
    mask = pack_rolled_draft_token_mask(TOKEN_MASK, torch.ones(2), (0, 5, 8), (0, 8, 12))
    assert mask.tolist() == [[0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0]]


def test_a_dropped_sample_is_all_zero() -> None:
    mask = pack_rolled_draft_token_mask(TOKEN_MASK, torch.tensor([0.0, 1]), (0, 5, 8), (0, 8, 12))
    assert mask.tolist() == [[0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]]


def test_a_full_segment_ends_in_zero_though_its_first_token_is_trained() -> None:
    mask = pack_rolled_draft_token_mask(torch.ones(1, 4), torch.ones(1), (0, 4), (0, 4))
    assert mask.tolist() == [[1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("token", "sample", "product"),
    [
        (torch.bool, torch.bool, torch.bool),
        (torch.bool, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.int64, torch.bool, torch.int64),
    ],
)
def test_the_mask_has_the_dtype_of_the_product(
    token: torch.dtype, sample: torch.dtype, product: torch.dtype
) -> None:
    mask = pack_rolled_draft_token_mask(
        torch.ones(1, 4).to(token), torch.ones(1).to(sample), (0, 4), (0, 4)
    )
    assert mask.dtype == product
    assert mask.shape == (1, 4)


def test_a_rank_holds_its_window_of_the_global_mask() -> None:
    layout = PackedLayout.from_cu_seqlens((0, 5, 8), (0, 8, 16), cp_size=2)
    assert draft_token_mask(TOKEN_MASK, layout, cp_rank=0).tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert draft_token_mask(TOKEN_MASK, layout, cp_rank=1).tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_masks_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample_mask has shape \[3\].* 2 rows"):
        pack_rolled_draft_token_mask(TOKEN_MASK, torch.ones(3), (0, 5, 8), (0, 8, 12))
    with pytest.raises(ValueError, match=r"token_mask has shape \[6\]"):
        pack_rolled_draft_token_mask(TOKEN_MASK[0], torch.ones(1), (0, 5), (0, 8))
