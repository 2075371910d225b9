"""Checks and known faults: ranks."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = ()

FAULTS: tuple[FaultInfo, ...] = ()
