"""Checks and known faults: layout."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = ()

FAULTS: tuple[FaultInfo, ...] = ()
