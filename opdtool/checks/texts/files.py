"""Checks and known faults: directories and the manifests that describe them."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        code="OPD901",
        name="manifest-files",
        statement="Every file that manifest.json lists is there in its size, and none is there "
        "that it does not list.",
        why="A pack with a file missing trains on a part of the batch; one left over from another "
        "run mixes two batches. Shapes are right in both.",
        cause="A copy that was cut short, or files of two runs copied into one directory.",
        fix="Copy the directory again, or write it again with --force.",
    ),
    CheckInfo(
        code="OPD902",
        name="manifest-hashes",
        statement="Every file has the sha256 that manifest.json gives.",
        why="The bytes are not those that were written and checked.",
        cause="A file was edited or damaged after it was written, or comes from another run.",
        fix="Copy the directory again, or write it again with --force.",
    ),
    CheckInfo(
        code="OPD903",
        name="manifest-tensors",
        statement="Every file holds the tensors that manifest.json lists, in their dtypes and "
        "shapes.",
        why="A reader that trusts the manifest reads other tensors than were meant.",
        cause="manifest.json was edited by hand, or its files were replaced.",
        fix="Write the directory again with --force; do not edit the manifest.",
    ),
)

FAULTS: tuple[FaultInfo, ...] = ()
