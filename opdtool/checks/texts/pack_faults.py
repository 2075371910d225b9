"""Known faults of where rows lie, how ranks cut them, targets, positions and offsets."""

from opdtool.checks.registry import FaultInfo

_VERIFY = ("verify-mask", "verify-pack")
_CP = ("verify-mask", "verify-pack", "reconstruct")
_PACK = ("verify-pack",)

PLACE_FAULTS: tuple[FaultInfo, ...] = (
    FaultInfo(
        name="laid-out-unpadded",
        statement="rows were placed by cu_seqlens instead of cu_seqlens_padded, end to end",
        why="Attention and every other tensor begin sequences at the padded offsets, so all but "
        "the first sequence are read from the wrong slots.",
        cause="packed[cu_seqlens[b] : cu_seqlens[b + 1]] = row[:length]",
        fix="Place row b at cu_seqlens_padded[b] and leave the rest of its segment zero.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="rows-permuted",
        statement="the segments hold the rows in another order than sequence_index says",
        why="Whatever is joined by row, such as rewards, teacher logits or sample masks, meets "
        "the wrong sequence.",
        cause="order = sorted(range(B), key=length); pack(rows[order])  # order not recorded",
        fix="Write the order as sequence_index, or pack in the batch's order.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="left-padded-rows",
        statement="rows were aligned to the right, their padding in front",
        why="Padding is taken for the first tokens of every sequence that is shorter than its "
        "room, and as many real tokens are cut off or moved.",
        cause='tokenizer.padding_side = "left"  # rollouts are generated left-padded',
        fix="Align rows to the left before packing: row.roll(-(S - length)).",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="lengths-off-by-one",
        statement="every sequence is one token shorter (or longer) than it is",
        why="The last token of every sequence, often the end-of-sequence token, is not trained "
        "on (or a padding token is): the model does not learn to stop.",
        cause="lengths = mask.sum(-1) - 1, or the index of the last token taken as the length",
        fix="A length is a count of tokens: last index plus one.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="tail-not-clamped",
        statement="the tail padding that the last segment absorbed counts as real tokens",
        why="The last sequence of every pack is taken to run on to the pack's end: padding is "
        "trained on and attended to.",
        cause="n = cu_seqlens[b + 1] - cu_seqlens[b]  # inflated for the last b; not min(n, S)",
        fix="Clamp to the row's own length: min(n, length) when copying and counting.",
        commands=_VERIFY,
    ),
)

CUT_FAULTS: tuple[FaultInfo, ...] = (
    FaultInfo(
        name="targets-rolled-after-cp-cut",
        statement="target_ids were rolled on each rank's own zig-zag piece, after the cut",
        why="At the end of each of the rank's two chunks the target is a token of the other "
        "chunk, thousands of positions away.",
        cause="ids = cp_slice(packed_ids); targets = torch.roll(ids, -1, -1)",
        fix="Roll the whole pack, then cut its windows: _pack_input_ids(..., roll_shift=-1).",
        commands=_PACK,
    ),
    FaultInfo(
        name="cp-contiguous",
        statement="each sequence was cut into contiguous pieces, one a rank, not into the "
        "zig-zag windows",
        why="Megatron's attention takes a rank's slots for chunk r and chunk 2CP-1-r; contiguous "
        "pieces give it tokens in an order that never was.",
        cause="torch.chunk(segment, cp_size)[cp_rank]",
        fix="Cut each segment into 2*CP chunks and take chunk r, then chunk 2*CP-1-r.",
        commands=_CP,
    ),
    FaultInfo(
        name="cp-rank-swapped",
        statement="the right pieces are on the wrong context-parallel ranks",
        why="Each rank's hidden states meet another rank's weights and targets.",
        cause="cp_rank taken from the global or tensor-parallel rank",
        fix="Take the rank from the context-parallel group: torch.distributed.get_rank(cp_group).",
        commands=_CP,
    ),
    FaultInfo(
        name="cp-split-whole-pack",
        statement="the ranks' pieces were cut from the whole pack instead of from each sequence",
        why="Attention expects each rank to hold two chunks of every sequence; a cut of the whole "
        "pack gives one rank whole sequences and another none of them.",
        cause="packed.chunk(2 * cp_size)[cp_rank]  # not per segment",
        fix="Cut every segment for itself, by cu_seqlens_padded.",
        commands=_CP,
    ),
)

CONTENT_FAULTS: tuple[FaultInfo, ...] = (
    FaultInfo(
        name="targets-not-shifted",
        statement="target_ids equal input_ids: they were not shifted",
        why="The model is trained to copy its input. The loss falls to almost nothing at once.",
        cause="target_ids = input_ids",
        fix="Pack the targets with a roll of -1.",
        commands=_PACK,
    ),
    FaultInfo(
        name="targets-shifted-right",
        statement="target_ids were shifted to the right: slot t holds token t-1",
        why="The model is trained to name the token before, which it can see.",
        cause="torch.roll(input_ids, 1, dims=-1)  # the sign of -1 lost",
        fix="Shift left: slot t holds token t+1.",
        commands=_PACK,
    ),
    FaultInfo(
        name="targets-shifted-twice",
        statement="target_ids were shifted left twice: slot t holds token t+2",
        why="The model learns to skip a token, and generates so.",
        cause="the data loader shifts, and the loss shifts again",
        fix="Shift in one place alone.",
        commands=_PACK,
    ),
    FaultInfo(
        name="targets-cross-boundary",
        statement="target_ids were rolled over the whole pack: a segment's last slot holds the "
        "next sequence's first token",
        why="Unless that slot is masked everywhere, sequences are trained to predict unrelated "
        "ones.",
        cause="torch.roll(packed_ids, -1, dims=-1)  # blind to cu_seqlens",
        fix="Roll inside each segment: roll_packed_seq_dim, or _pack_input_ids with roll_shift=-1.",
        commands=_PACK,
    ),
    FaultInfo(
        name="positions-not-restarted",
        statement="position_ids run on over the pack instead of starting at 0 in every sequence",
        why="All but the first sequence are at positions they never have in use, and rotary "
        "embeddings past the trained range degrade them.",
        cause="position_ids = torch.arange(total)",
        fix="Restart at every segment: arange(total) - cu_seqlens_padded[segment].",
        commands=_PACK,
    ),
)

OFFSET_FAULTS: tuple[FaultInfo, ...] = (
    FaultInfo(
        name="cu-seqlens-swapped",
        statement="cu_seqlens and cu_seqlens_padded are exchanged",
        why="Attention takes padding for tokens and cuts real ones off.",
        cause="PackedSeqParams(cu_seqlens_q=padded, cu_seqlens_q_padded=real)",
        fix="Exchange the two arguments.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="cu-seqlens-padded-twice",
        statement="the padded offsets were passed as the real ones, and the content follows them",
        why="Padding counts as real tokens in every sequence: it is attended to and trained on.",
        cause="pack(rows, cu_seqlens=cu_seqlens_padded, cu_seqlens_padded=cu_seqlens_padded)",
        fix="Pass the real cumulative lengths as cu_seqlens.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="cu-seqlens-divided-by-cp",
        statement="the cumulative lengths were divided by the context-parallel size",
        why="They are global by contract: Transformer Engine divides them itself, and divided "
        "twice they end every sequence early.",
        cause="cu_seqlens = cu_seqlens // cp_size  # before handing them to attention",
        fix="Pass the global cumulative lengths, as if there were one rank.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="cu-seqlens-not-monotone",
        statement="the cumulative lengths fall somewhere",
        why="A kernel that trusts them reads before its buffer or skips sequences.",
        cause="lengths taken for cumulative lengths, an int overflow, or unsorted gathering",
        fix="Build them with cumsum over non-negative lengths, in int64 or checked int32.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="cu-seqlens-wrong-end",
        statement="the cumulative lengths do not end where the pack ends",
        why="The slots after the end belong to no sequence, or the last sequence runs past the "
        "buffer.",
        cause="tail padding added to the tokens and not to cu_seqlens_padded[-1]",
        fix="Make cu_seqlens_padded[-1] the number of packed slots, and cu_seqlens[-1] the number "
        "of real tokens.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="padding-multiple-wrong",
        statement="sequences are not padded to the multiple that the geometry needs",
        why="A sequence that is no multiple of 2*CP cannot be cut evenly: frameworks lose tokens "
        "silently or fail with an opaque shape error.",
        cause="pad to a multiple of cp_size (or of tp_size) instead of 2 * cp_size (* tp_size)",
        fix="Pad each sequence to a multiple of (2*CP if CP > 1) * (TP with sequence parallelism).",
        commands=_VERIFY,
    ),
)
