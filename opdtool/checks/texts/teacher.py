"""Checks and known faults: teacher."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = ()

FAULTS: tuple[FaultInfo, ...] = ()
