"""The equivalence suite of ``opdtool simulate`` (contract 8): one check a property."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        code="OPD701",
        name="packed-equals-unpacked",
        statement="every slot of the whole pack holds the token of its row, and unpacking gives "
        "the rows back",
        why="A token in another sequence's place is trained on with the wrong context.",
        cause="offsets from the real lengths where the padded ones belong",
        fix="Place every row at cu_seqlens_padded and leave its padding zero.",
    ),
    CheckInfo(
        code="OPD702",
        name="cp-shards-gathered",
        statement="every context-parallel rank holds its two chunks of each segment, and the "
        "shards gathered equal the pack without context parallelism",
        why="Ranks that cut other windows than attention expects compute on shuffled sequences.",
        cause="contiguous pieces, or windows of the whole pack instead of each segment",
        fix="Cut each segment into 2*CP chunks; rank r takes chunk r, then chunk 2*CP-1-r.",
    ),
    CheckInfo(
        code="OPD703",
        name="tokens-owned-once",
        statement="every real token is in exactly one slot of exactly one rank, the one that the "
        "layout names",
        why="A token owned twice counts twice in the loss; one owned by nobody is never trained.",
        cause="windows that overlap, or that leave the last chunk out",
        fix="Derive every window from one layout; pad segments to a multiple of 2*CP.",
    ),
    CheckInfo(
        code="OPD704",
        name="roll-shifts-left",
        statement="rolling puts token p+1 into slot p inside each segment",
        why="A target off by one trains the model to predict the wrong token.",
        cause="roll(+1) for roll(-1), or one roll of a rank's own piece",
        fix="Roll each whole segment by -1 before the context-parallel cut.",
    ),
    CheckInfo(
        code="OPD705",
        name="segment-ends-zero",
        statement="after rolling, the last slot of every segment is zero",
        why="What wraps or leaks into the last slot belongs to the next or the same sequence's "
        "start, and is trained on.",
        cause="one circular roll over the whole pack, its segment ends not zeroed",
        fix="Zero slot cu_seqlens_padded[i+1]-1 of every segment after the roll.",
    ),
    CheckInfo(
        code="OPD706",
        name="draft-mask-cut",
        statement="every rank's draft mask is its window of the global mask, in which slot t "
        "holds the weight of token t+1",
        why="A mask that is rolled after the cut trains the wrong tokens at every chunk's end.",
        cause="rolling each rank's zig-zag piece",
        fix="Shift the whole segment first, then cut it.",
    ),
    CheckInfo(
        code="OPD707",
        name="logits-moved",
        statement="every rank's part of a logits payload equals its columns and positions of the "
        "whole, bit for bit",
        why="A window shifted by a rank distils the wrong vocabulary entries.",
        cause="the vocabulary window of another rank, or the sequence cut before it is padded",
        fix="Columns [rank*V/TP, (rank+1)*V/TP); pad the sequence, then cut its zig-zag window.",
    ),
    CheckInfo(
        code="OPD708",
        name="tp-logits-gathered",
        statement="rebuilt logits of all tensor- and context-parallel ranks, gathered, equal those "
        "without parallelism within the bound of a product",
        why="The teacher's distribution depends on how many GPUs there are.",
        cause="head shards in another order than the ranks, or the padding projected",
        fix="Give rank r rows [r*V/TP, (r+1)*V/TP) of the head.",
    ),
    CheckInfo(
        code="OPD709",
        name="packed-logits",
        statement="logits rebuilt from a packed row, gathered, equal those of its sequences",
        why="A pack cut as one long sequence gives every rank positions of other sequences.",
        cause="no cu_seqlens_padded passed for a packed payload",
        fix="Pass cu_seqlens_padded, so that each segment is cut by itself.",
    ),
    CheckInfo(
        code="OPD710",
        name="heads-routed",
        statement="every row is projected by its own teacher's head",
        why="A row that learns from another teacher learns the wrong task.",
        cause="one head for all rows, or an index that is not permuted with the rows",
        fix="Route by opd_full_teacher_index, and permute it whenever rows are.",
    ),
    CheckInfo(
        code="OPD711",
        name="draft-columns",
        statement="draft columns that are exchanged between tensor-parallel ranks, gathered, equal "
        "the columns i + d2t[i] of the whole vocabulary, bit for bit",
        why="A draft class that is given another token's logit is trained towards that token.",
        cause="target ids looked up in the local shard, or the exchange's order lost",
        fix="Ask each owner for the columns wanted, in the order wanted.",
    ),
    CheckInfo(
        code="OPD712",
        name="draft-gradients",
        statement="the gradient of every vocabulary column is the sum over all ranks that asked "
        "for it",
        why="A gradient that stays on one rank trains a part of the vocabulary only.",
        cause="a gather without a backward pass, or one that keeps the own rank's share alone",
        fix="Send each gradient back to its column's owner and add there.",
    ),
    CheckInfo(
        code="OPD713",
        name="metrics-microbatches",
        statement="metrics of microbatches, rescaled and added, equal the metric of the batch",
        why="A loss averaged over microbatches of unequal size weighs tokens unequally.",
        cause="a mean of means",
        fix="Rescale by local over global tokens (or sequences) before adding.",
    ),
    CheckInfo(
        code="OPD714",
        name="ranks-agree",
        statement="ranks in processes give the same bits as simulated ranks",
        why="What is proved on a laptop must hold on the cluster.",
        cause="another number of threads, or another library, in the ranks' processes",
        fix="Give every rank the same OMP_NUM_THREADS, torch and device.",
    ),
)

FAULTS: tuple[FaultInfo, ...] = ()
