"""What must hold of rebuilt teacher logits, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opdtool.checks.registry import check_name
from opdtool.core.words import plural
from opdtool.findings import MAX_PLACES, Finding, Scalar, Status

Places = Sequence[Mapping[str, Scalar]]


def _finding(
    code: str,
    status: Status,
    message: str,
    tensor: str | None = None,
    *,
    mismatches: int | None = None,
    total: int | None = None,
    first: Places = (),
) -> Finding:
    return Finding(
        code=code,
        name=check_name(code),
        status=status,
        message=message,
        tensor=tensor,
        mismatches=mismatches,
        total=total,
        first=tuple(first[:MAX_PLACES]),
    )


def logits_finite(
    tensor: str, total: int, not_finite: int, low: float, high: float, first: Places
) -> Finding:
    """OPD501: the rebuilt logits of ``tensor``, ``total`` of them, in [low, high]."""
    if not_finite:
        message = f"{not_finite:,} of {total:,} rebuilt logits are NaN or infinite"
        return _finding(
            "OPD501", "fail", message, tensor, mismatches=not_finite, total=total, first=first
        )
    message = f"{total:,} rebuilt logits are finite, from {low:.6g} to {high:.6g}"
    return _finding("OPD501", "pass", message, tensor, mismatches=0, total=total)


def reference_columns(
    tensor: str, widths: Sequence[int], expected: int, *, also: int | None = None
) -> Finding:
    """OPD502: ``widths`` of the reference's shards, of which ``expected`` columns (or ``also``,
    the columns without padding) are rebuilt."""
    total = sum(widths)
    if len(set(widths)) > 1:
        shown = ", ".join(str(width) for width in widths[:8])
        message = f"the shards have {shown} columns; expected {expected} in equal parts"
        return _finding("OPD502", "fail", message, tensor)
    if total not in (expected, also):
        message = f"the reference has {plural(total, 'column')}, but {expected} are rebuilt"
        return _finding("OPD502", "fail", message, tensor)
    parts = f" in {len(widths)} equal shards" if len(widths) > 1 else ""
    return _finding("OPD502", "pass", f"{plural(total, 'column')}{parts}", tensor)


def logits_match(
    tensor: str, total: int, mismatches: int, least: float, formula: str, first: Places
) -> Finding:
    """OPD503: ``mismatches`` of ``total`` logits are outside the bound; the worst is ``least``
    times the bound."""
    if mismatches:
        message = (
            f"{mismatches:,} of {total:,} recorded logits differ by more than {formula}; "
            f"the worst is {least:.4g} times that"
        )
        status: Status = "fail"
    else:
        message = f"{total:,} recorded logits agree: {formula} (the worst is {least:.4g} of it)"
        status = "pass"
    return _finding(
        "OPD503", status, message, tensor, mismatches=mismatches, total=total, first=first
    )


def logprobs_match(
    tensor: str,
    total: int,
    mismatches: int,
    greatest: float,
    first: Places,
    *,
    formula: str,
    least: float,
) -> Finding:
    """OPD504: ``mismatches`` of ``total`` recorded log-probabilities are outside the bound; the
    greatest error is ``greatest`` nats, the worst ``least`` times its bound."""
    if mismatches:
        message = (
            f"{mismatches:,} of {total:,} recorded log-probabilities differ from those of the "
            f"rebuilt logits, by up to {greatest:.6g}, by more than {formula}; the worst is "
            f"{least:.4g} times that"
        )
        status: Status = "fail"
    else:
        message = (
            f"{total:,} recorded log-probabilities agree, within {greatest:.6g}: {formula} "
            f"(the worst is {least:.4g} of it)"
        )
        status = "pass"
    return _finding(
        "OPD504", status, message, tensor, mismatches=mismatches, total=total, first=first
    )


def head_identity(changed: Sequence[str], total: int) -> Finding:
    """OPD505: sentences about heads that are not those in the reference's manifest."""
    if changed:
        return _finding("OPD505", "fail", "; ".join(changed), mismatches=len(changed), total=total)
    return _finding(
        "OPD505",
        "pass",
        f"{total} heads are those that the reference's manifest binds",
        mismatches=0,
        total=total,
    )


def divergence_finite(tensor: str, total: int, bad: int, first: Places) -> Finding:
    """OPD506: ``bad`` of ``total`` positions that count have no finite divergence."""
    if bad:
        message = f"{bad:,} of {total:,} positions have a divergence that is infinite or NaN"
        return _finding("OPD506", "fail", message, tensor, mismatches=bad, total=total, first=first)
    return _finding(
        "OPD506",
        "pass",
        f"divergences of {total:,} positions are finite",
        tensor,
        mismatches=0,
        total=total,
    )
