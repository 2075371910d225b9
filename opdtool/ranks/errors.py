"""What goes wrong between ranks."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank failed, or the ranks could not meet: the rank, and what stopped it.

    An input that a rank refuses stays an :class:`~opdtool.core.errors.InputError`; this is for
    everything else. ``trace`` is the rank's traceback where its own code failed, which is a
    defect of opdtool; without it the rank was lost.
    """

    def __init__(self, message: str, *, rank: int | None = None, trace: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.trace = trace


class RunEnded(BaseException):
    """Raised in a rank that waits for others when one of them has failed.

    Not an ``Exception``, so that rank-local code that tidies up after errors does not take it
    for one of its own.
    """
