"""Checks and known faults: content."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = ()

FAULTS: tuple[FaultInfo, ...] = ()
