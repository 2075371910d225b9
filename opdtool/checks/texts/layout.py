"""Checks of a pack's cumulative lengths. Their known faults are listed with the masks'."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        code="OPD101",
        name="cu-seqlens-dtype",
        statement="cumulative lengths are a vector of integers",
        why="Attention kernels read them as int32; floats lose exactness past 2**24 tokens.",
        cause="torch.cumsum of a float mask",
        fix="Convert: cu_seqlens.to(torch.int32), shape [N+1].",
    ),
    CheckInfo(
        code="OPD102",
        name="cu-seqlens-start",
        statement="cumulative lengths start at 0",
        why="Without the leading zero the first sequence is lost and all others are one off.",
        cause="torch.cumsum(lengths, 0) without torch.nn.functional.pad(..., (1, 0))",
        fix="Put a 0 in front of the cumulative sum.",
    ),
    CheckInfo(
        code="OPD103",
        name="cu-seqlens-order",
        statement="cumulative lengths never fall",
        why="A falling offset is a sequence of negative length: kernels read out of bounds.",
        cause="lengths in place of cumulative lengths, or an overflow",
        fix="Build them with cumsum over non-negative lengths.",
    ),
    CheckInfo(
        code="OPD104",
        name="cu-seqlens-entries",
        statement="both vectors have one entry more than there are segments, and every segment "
        "comes from a row of the batch",
        why="A missing or extra entry moves every later sequence.",
        cause="the tail segment counted in one vector and not in the other; a partial batch "
        "without sequence_index",
        fix="Give both vectors N+1 entries, and sequence_index for a part of a batch.",
    ),
    CheckInfo(
        code="OPD105",
        name="cu-seqlens-fit",
        statement="no sequence is longer than its padded segment",
        why="Tokens that do not fit are lost or overwrite the next sequence.",
        cause="the two vectors exchanged, or padded lengths rounded down",
        fix="Round padded lengths up; pass the padded vector as cu_seqlens_padded.",
    ),
    CheckInfo(
        code="OPD106",
        name="padding-multiple",
        statement="padded lengths are multiples of what CP, TP and sequence parallelism need, and "
        "the total of what fp8 needs",
        why="A segment that is no multiple of 2*CP cannot be cut into zig-zag windows; a total "
        "that is none fails in the fp8 kernel.",
        cause="padding to CP instead of 2*CP, or forgetting TP under sequence parallelism",
        fix="Pad with the geometry that training uses: opdtool pack --cp N --tp N.",
    ),
    CheckInfo(
        code="OPD107",
        name="packed-length",
        statement="cu_seqlens_padded ends at the number of packed slots",
        why="Slots past the end belong to no sequence; a longer end reads past the buffer.",
        cause="tail padding added to the tensors alone, or cumulative lengths divided by CP",
        fix="Add the tail to the last entry, and keep cumulative lengths global.",
    ),
    CheckInfo(
        code="OPD108",
        name="real-lengths",
        statement="the real lengths are those of the batch",
        why="Lengths decide what attention sees and what counts as a token.",
        cause="lengths off by one, taken from the padded rows, or in another order of rows",
        fix="Take lengths from the attention mask of the same rows: attention_mask.sum(-1).",
    ),
    CheckInfo(
        code="OPD109",
        name="sequence-index",
        statement="sequence_index names rows of the batch, each at most once",
        why="It ties each packed segment to its rewards, tags and teacher rows.",
        cause="indices within a microbatch in place of those within the batch",
        fix="Write the row of the whole batch for every segment.",
    ),
    CheckInfo(
        code="OPD110",
        name="ranks-agree",
        statement="all context-parallel ranks of a pack have the same cumulative lengths and "
        "sequence_index",
        why="Ranks that disagree about sequences exchange the wrong keys and values.",
        cause="each rank packing its own batch, or local lengths in place of global ones",
        fix="Broadcast the layout from one rank, or build it from the same global lengths.",
    ),
)

FAULTS: tuple[FaultInfo, ...] = ()
