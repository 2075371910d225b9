"""The draft-loss mask (contract 3.3)."""

from __future__ import annotations

from torch import Tensor

from opdtool.core.errors import InputError
from opdtool.core.layout import PackedLayout
from opdtool.core.offsets import CuSeqlens, Pieces, as_offsets
from opdtool.core.packing import fill_pieces, pack_input_ids, roll_packed_seq_dim
from opdtool.core.words import plural


def token_weights(token_mask: Tensor, sample_mask: Tensor | None) -> Tensor:
    """``token_mask`` [B,S] times ``sample_mask`` [B], in the dtype of their product.

    Raises:
        InputError: the shapes do not belong together.
    """
    if token_mask.ndim != 2:
        raise InputError(f"token_mask has shape {list(token_mask.shape)}; expected [B,S]")
    if sample_mask is None:
        return token_mask
    if sample_mask.shape != token_mask.shape[:1]:
        raise InputError(
            f"sample_mask has shape {list(sample_mask.shape)}; expected one entry for each of "
            f"the {plural(token_mask.shape[0], 'row')} of token_mask"
        )
    return token_mask * sample_mask.unsqueeze(-1)


def pack_rolled_draft_token_mask(
    token_mask: Tensor,
    sample_mask: Tensor,
    cu_seqlens: CuSeqlens,
    cu_seqlens_padded: CuSeqlens,
) -> Tensor:
    """The whole pack's draft-loss mask: [B,S] and [B] -> [1,T] (contract 3.3).

    Slot t of a segment holds the weight of token t+1 of that sequence: the model predicts
    the next token there. Every sequence's last real slot and all padding are zero.

        token_mask   0 0 1 1   (4 tokens, padded to 6)
        mask         0 1 1 0 0 0

    Raises:
        InputError: shapes or cumulative lengths that do not belong together.
    """
    weights = token_weights(token_mask, sample_mask)
    offsets = as_offsets(cu_seqlens_padded, "cu_seqlens_padded")
    packed = pack_input_ids(weights, cu_seqlens, offsets)
    return roll_packed_seq_dim(packed, offsets, seq_dim=1)


def draft_pieces(layout: PackedLayout, *, cp_rank: int = 0, limit: int | None = None) -> Pieces:
    """The runs that fill one rank's window of the global draft mask from token weights.

    The roll is done on the whole segment, before the context-parallel cut. What a circular
    roll would bring back from a row's first token is left out: that slot speaks of a token
    that is not there.
    """
    return layout.pieces(cp_rank, shift=-1, limit=limit).clip(1, layout.total)


def draft_token_mask(weights_BS: Tensor, layout: PackedLayout, *, cp_rank: int = 0) -> Tensor:
    """One rank's window of the global draft mask: weights [B,S] -> [T / cp_size].

    Row n of the weights fills segment n.
    """
    pieces = draft_pieces(layout, cp_rank=cp_rank, limit=weights_BS.shape[1])
    return fill_pieces(weights_BS, pieces, layout.local_total)
