"""Checks and known faults: files."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = ()

FAULTS: tuple[FaultInfo, ...] = ()
