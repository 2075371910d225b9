"""Checks of a pack's content. Their known faults are listed with the masks'."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        code="OPD201",
        name="input-ids",
        statement="packed input_ids are the batch's tokens, each in its slot",
        why="Everything else in the pack is tied to these slots.",
        cause="rows placed by the wrong offsets, in another order, or cut wrongly over ranks",
        fix="Place row b at cu_seqlens_padded[b] and cut each segment into zig-zag windows.",
    ),
    CheckInfo(
        code="OPD202",
        name="target-ids",
        statement="target_ids hold the next token wherever there is one",
        why="The loss trains whatever stands here.",
        cause="no shift, two shifts, or a shift made after the context-parallel cut",
        fix="Pack the targets like input_ids, rolled by -1 before the cut.",
    ),
    CheckInfo(
        code="OPD203",
        name="position-ids",
        statement="position_ids start at 0 in every sequence",
        why="Rotary embeddings place every token by them.",
        cause="torch.arange(total) over the whole pack, or over a rank's own slots",
        fix="Restart at every segment, and cut positions into the same windows as input_ids.",
    ),
    CheckInfo(
        code="OPD204",
        name="token-aligned",
        statement="every other token-aligned tensor is the batch's, zero in padding",
        why="Advantages, log-probabilities and masks that are a slot off weigh other tokens.",
        cause="packed with another layout than input_ids, or shifted like the targets",
        fix="Pack every [B,S,...] tensor with one layout: opdtool.pack.",
    ),
    CheckInfo(
        code="OPD205",
        name="row-aligned",
        statement="[B,...] tensors are in sequence_index order",
        why="Rewards, teacher tags and sample masks meet other sequences.",
        cause="rows sorted for packing, and the per-row tensors left as they were",
        fix="Index per-row tensors with sequence_index.",
    ),
    CheckInfo(
        code="OPD206",
        name="padding-fill",
        statement="padding is filled as opdtool pack fills it",
        why="Nothing reads padding in a correct run; other stacks fill it in other ways.",
        cause="padding with the tokenizer's pad id, or positions that stop at the last token",
        fix="Nothing to mend where attention and loss leave padding out.",
    ),
    CheckInfo(
        code="OPD207",
        name="packed-shape",
        statement="every tensor of a pack has its slots, the same on every rank",
        why="A tensor of another size is broadcast or cut silently.",
        cause="one tensor cut for context parallelism and another not",
        fix="Cut every token-aligned tensor into the same windows.",
    ),
    CheckInfo(
        code="OPD208",
        name="target-fill",
        statement="targets without a next token hold 0, -100 or a token of their own sequence",
        why="A target from another sequence is trained on wherever the mask does not cover it.",
        cause="torch.roll over the whole pack",
        fix="Roll inside each segment, and set its last target to -100 or 0.",
    ),
    CheckInfo(
        code="OPD209",
        name="rows-covered",
        statement="every row of the batch is in one pack",
        why="A row left out is never trained on; a row in two packs counts twice.",
        cause="bins that overlap, or a last incomplete microbatch dropped",
        fix="Write every bin, and each row once.",
    ),
)

FAULTS: tuple[FaultInfo, ...] = ()
