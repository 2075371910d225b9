"""Checks of the small commands: inspect, compare and check."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        code="OPD940",
        name="manifest-files",
        statement="The directory holds the files, sizes, hashes and tensors of its manifest.",
        why="Files of two runs in one directory, or a copy that was cut short, train on data that "
        "nobody made.",
        cause="A directory was copied in part, edited by hand, or written into by something else.",
        fix="Write the directory again, or copy it again whole.",
    ),
    CheckInfo(
        code="OPD941",
        name="canonical-shape",
        statement="Tensors with a canonical name have that name's shape, and agree on B, S and T.",
        why="A tensor with a dimension missing or swapped broadcasts silently in the loss.",
        cause="A squeeze or a transpose before the dump, or a name that means something else.",
        fix="Dump the tensor in the canonical shape, or under a name of its own.",
    ),
    CheckInfo(
        code="OPD942",
        name="canonical-dtype",
        statement="Tensors with a canonical name have that name's dtype.",
        why="Token ids in a float dtype lose ids past 2^24 (float32) or 256 (bfloat16); a mask in "
        "an integer dtype is used as an index.",
        cause="A whole batch was cast with one .to(dtype) before it was dumped.",
        fix="Keep ids and indices integers, masks float or bool, logits and hidden states float.",
    ),
    CheckInfo(
        code="OPD943",
        name="finite-values",
        statement="Tensors hold neither NaN nor infinities.",
        why="One NaN in a teacher's logits makes the whole loss NaN; an infinity does so as soon "
        "as it meets a zero weight.",
        cause="A half-precision overflow, or reading memory that nothing was written to.",
        fix="Find where the value was made; mask in the loss, not in the logits.",
    ),
    CheckInfo(
        code="OPD950",
        name="same-tensors",
        statement="Both sides hold the same tensors under the same names.",
        why="A tensor that one side lacks was never compared, and may be all that matters.",
        cause="Two versions of the dump hook, or a rename on one side only.",
        fix="Dump the tensor on both sides, or name it alike.",
    ),
    CheckInfo(
        code="OPD951",
        name="same-shape",
        statement="Each tensor has the same shape on both sides.",
        why="Tensors of different shapes are different data, whatever their overlap holds.",
        cause="Different padding, another batch, or another parallel size.",
        fix="Dump both sides from the same batch and geometry.",
    ),
    CheckInfo(
        code="OPD952",
        name="same-dtype",
        statement="Each tensor has the same dtype on both sides.",
        why="A value that was rounded on one side differs from the other where it matters most.",
        cause="One side casts before it dumps.",
        fix="Dump both sides in one dtype; compare what was computed, not what was rounded.",
    ),
    CheckInfo(
        code="OPD953",
        name="same-values",
        statement="Each tensor holds the same values on both sides, within --rtol and --atol.",
        why="Two computations that should agree do not.",
        cause="It depends on the tensor; the places of the differences tell most.",
        fix="Look at the places listed; give --rtol or --atol where rounding is expected.",
    ),
    CheckInfo(
        code="OPD990",
        name="step-completed",
        statement="Every step of a suite ran to its end.",
        why="A step that did not run has checked nothing.",
        cause="A file that is missing, an option that is wrong, or an earlier step that failed.",
        fix="Read the step's error; set continue_on_failure to run what comes after.",
    ),
)

FAULTS: tuple[FaultInfo, ...] = ()
