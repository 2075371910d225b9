"""Known faults of draft-loss masks, in the order in which they are tried and listed."""

from opdtool.checks.registry import FaultInfo

_VERIFY = ("verify-mask", "verify-pack")

MASK_FAULTS: tuple[FaultInfo, ...] = (
    FaultInfo(
        name="mask-not-shifted",
        statement="the mask was packed as it is, without the shift by one",
        why="Slot t of a draft model's loss predicts token t+1, so its weight is that of token "
        "t+1. An unshifted mask trains the last prompt token's prediction with weight 0 and "
        "the prediction after the final answer token with weight 1: every sequence learns one "
        "wrong token and loses one right one, and the loss still falls.",
        cause="draft_mask = pack(token_mask)  # while target_ids = pack(roll(input_ids, -1))",
        fix="Roll the packed mask left by one inside each segment: "
        "roll_packed_seq_dim(pack(token_mask), cu_seqlens_padded, -1).",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-shifted-right",
        statement="the mask was shifted to the right, so that slot t speaks of token t-1",
        why="The weights are two slots from where they belong: the first answer tokens are not "
        "trained, and two predictions after the answer's end are.",
        cause="torch.roll(mask, 1, dims=-1)  # the sign of -1 lost",
        fix="Shift left: torch.roll(..., -1) with the last slot of each segment zeroed.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-shifted-twice",
        statement="the mask was shifted left twice",
        why="Two places each shift by one, say the data loader and the loss. Training begins one "
        "token too early in the prompt and leaves the answer's last token out.",
        cause="mask = roll(mask); ...; loss(draft_logits, roll(mask))",
        fix="Shift in one place alone; hand the loss a mask that it need not move.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-leaks-across-boundary",
        statement="the whole pack was rolled at once, so each segment's last slot holds the "
        "weight of the next sequence's first token",
        why="The last slot of a sequence is trained to predict the first token of another "
        "sequence wherever that token is trained on: noise that no length of training averages "
        "away.",
        cause="torch.roll(packed_mask, -1, dims=-1)  # blind to cu_seqlens",
        fix="Roll inside each segment and zero its last slot: roll_packed_seq_dim.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-wraps-within-segment",
        statement="each segment was rolled circularly, so its last slot holds the weight of its "
        "own first token",
        why="The last slot is trained to predict the sequence's own first token wherever that one "
        "is trained on.",
        cause="for s, e in segments: mask[s:e] = torch.roll(mask[s:e], -1)",
        fix="Zero each segment's last slot after the roll: roll_packed_seq_dim does.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-last-slot-kept",
        statement="the last real slot of every kept sequence has weight one",
        why="Nothing follows the last real token, so what its slot is trained to predict is "
        "padding, the next sequence or whatever the target tensor holds there.",
        cause="mask[:, :length] = 1 after the shift, or a shift that repeats the last value",
        fix="Zero the last real slot of every sequence: slot length-1 has no next token.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="sample-mask-ignored",
        statement="sample_mask was not multiplied in, so dropped rows are trained on",
        why="Rows that were filtered out, such as truncated or failed rollouts, are trained on as "
        "if they were good.",
        cause="mask = token_mask  # instead of token_mask * sample_mask.unsqueeze(-1)",
        fix="Multiply token_mask by sample_mask before packing.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="prompt-not-masked",
        statement="every real token counts as trained, the prompt too",
        why="The draft model is trained to predict user text and templates, which it never has to "
        "propose; the loss average is dominated by them and acceptance falls.",
        cause="mask = torch.arange(S) < lengths[:, None]  # the attention mask for the loss mask",
        fix="Use token_mask, the mask of trained tokens, not the attention mask.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-covers-padding",
        statement="padding slots have weight one",
        why="Padding is trained on: the loss is diluted by meaningless slots, and the more padding "
        "a pack has, the smaller its real gradient.",
        cause="mask = torch.ones(total); mask[:, :n] = packed  # padding filled with ones",
        fix="Fill with zeros: start from torch.zeros and copy the real tokens in.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-inverted",
        statement="the mask is one where it should be zero",
        why="The prompt is trained on and the answer is not: the run trains, on the wrong half.",
        cause="mask = ~token_mask, or a mask of tokens to leave out taken as one to keep",
        fix="Invert the mask, or read the dataset's flag the other way round.",
        commands=_VERIFY,
    ),
)

MASK_FAULTS_UNSHIFTED: tuple[FaultInfo, ...] = (
    FaultInfo(
        name="mask-shifted",
        statement="the mask is shifted already, where an unshifted one was promised",
        why="The consumer shifts on its own, so the weights end up one slot too early.",
        cause="mask = roll_packed_seq_dim(pack(token_mask), ...) handed to a loss that shifts",
        fix="Hand over the unshifted mask, or tell the consumer (and --convention) that it is "
        "rolled.",
        commands=_VERIFY,
    ),
    FaultInfo(
        name="mask-rolled-after-cp-cut",
        statement="the roll was made on each rank's own zig-zag piece, after the cut",
        why="A rank's piece of a sequence is two chunks that are not neighbours: at each chunk's "
        "end the next token lives on another rank, so the slot gets a weight of a far token or "
        "zero.",
        cause="mask = cp_slice(pack(token_mask)); mask = roll_packed_seq_dim(mask, cu // cp)",
        fix="Roll the whole pack first and cut the context-parallel windows after it.",
        commands=_VERIFY,
    ),
)
