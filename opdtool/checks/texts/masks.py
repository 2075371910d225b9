"""Checks of draft-loss masks, and all known faults of packs and masks in their fixed order."""

from opdtool.checks.registry import CheckInfo, FaultInfo
from opdtool.checks.texts.mask_faults import MASK_FAULTS, MASK_FAULTS_UNSHIFTED
from opdtool.checks.texts.pack_faults import (
    CONTENT_FAULTS,
    CUT_FAULTS,
    OFFSET_FAULTS,
    PLACE_FAULTS,
)

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        code="OPD301",
        name="mask-values",
        statement="every slot holds the weight of the token it predicts",
        why="A mask that is off by one, or counts the wrong rows, trains the wrong tokens. "
        "Shapes stay right and the loss goes down, so nothing else complains.",
        cause="a shift forgotten or made twice, a sample mask ignored, rows or ranks mixed up; "
        "the diagnosis names it where it is a known one",
        fix="Build the mask with pack_rolled_draft_token_mask or opdtool build-mask, and compare.",
    ),
    CheckInfo(
        code="OPD302",
        name="mask-shape",
        statement="the mask has one value for every packed slot of its rank",
        why="A mask of another size is broadcast or cut silently by the loss.",
        cause="a mask of the padded batch in place of the packed one; tail padding left out",
        fix="Pack the mask with the same layout as input_ids: [1, T/CP] on every rank.",
    ),
    CheckInfo(
        code="OPD303",
        name="mask-dtype",
        statement="the mask is bool, integer or floating point, the same on every rank",
        why="Other types change value when they meet the loss.",
        cause="a quantised or complex dtype from a careless cast",
        fix="Store the mask as bool or as the dtype of token_mask times sample_mask.",
    ),
    CheckInfo(
        code="OPD304",
        name="mask-finite",
        statement="no value of the mask is NaN or infinite",
        why="One NaN weight makes the whole loss NaN; an infinite one, the gradient.",
        cause="a mask normalised by a count of zero: mask / mask.sum()",
        fix="Keep the mask 0 and 1 (or finite weights) and normalise the loss with a clamp.",
    ),
    CheckInfo(
        code="OPD305",
        name="mask-range",
        statement="values are 0 and 1, or such weights as the batch's own masks hold",
        why="Other values weigh tokens in a way nobody chose: 255 for true, or a mask added up "
        "twice.",
        cause="uint8 masks from images of booleans (255), or mask + mask for mask | mask",
        fix="Compare with zero or clamp to one before packing.",
    ),
    CheckInfo(
        code="OPD306",
        name="mask-padding",
        statement="no padding slot has weight",
        why="Padding is trained on, and dilutes the loss of real tokens.",
        cause="padding filled with ones, or the tail of a pack taken for tokens",
        fix="Start from zeros and copy real tokens in.",
    ),
    CheckInfo(
        code="OPD307",
        name="mask-last-slot",
        statement="no sequence's last real slot has weight",
        why="Nothing follows the last real token: its slot would be trained on whatever the "
        "target tensor holds there.",
        cause="a roll that wraps or leaks, or no shift at all",
        fix="Zero the last slot inside each segment after the shift: roll_packed_seq_dim.",
    ),
    CheckInfo(
        code="OPD308",
        name="mask-dropped-rows",
        statement="rows with sample_mask 0 have no weight anywhere",
        why="Rows that were filtered out are trained on.",
        cause="sample_mask not multiplied in, or multiplied in another order of rows",
        fix="Multiply token_mask by sample_mask before packing.",
    ),
    CheckInfo(
        code="OPD309",
        name="mask-constant",
        statement="the mask is neither all zero nor all one",
        why="An all-zero mask trains nothing; an all-one mask trains padding and prompt.",
        cause="a placeholder that was never filled, or a filter that dropped everything",
        fix="Look at token_mask and sample_mask of this batch; the warning may be right as it is.",
    ),
    CheckInfo(
        code="OPD310",
        name="mask-empty-rows",
        statement="every kept row has something to train",
        why="A row without trained tokens costs compute and counts in averages over sequences.",
        cause="a prompt that filled the whole row, an answer cut off, or a row of one token",
        fix="Drop such rows with sample_mask, or leave them out of the batch.",
    ),
)

FAULTS: tuple[FaultInfo, ...] = (
    *MASK_FAULTS,
    *PLACE_FAULTS,
    *MASK_FAULTS_UNSHIFTED,
    *CUT_FAULTS,
    *CONTENT_FAULTS,
    *OFFSET_FAULTS,
)
