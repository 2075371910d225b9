"""From geometry options, or a manifest, to a PackGeometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from opdtool.core.errors import InputError
from opdtool.findings import Scalar

if TYPE_CHECKING:
    from opdtool.core.geometry import PackGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryOptions:
    """The geometry options as typed; None where the option was not given."""

    cp: int | None = None
    tp: int | None = None
    sequence_parallel: bool | None = None
    pad_multiple: int | None = None
    fp8: str | None = None
    pad_packed_multiple: int | None = None
    pad_packed_to: int | None = None
    tail: str | None = None

    def resolve(self, recorded: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
        """Every option's value: as typed, else as a manifest recorded it, else the default.

        Raises:
            InputError: an option that contradicts the manifest.
        """
        values = dict(DEFAULTS)
        if recorded is not None:
            values |= {name: recorded[name] for name in values if name in recorded}
            _refuse_types(values)
        for name, given in asdict(self).items():
            if given is None:
                continue
            if recorded is not None and name in recorded and recorded[name] != given:
                flag = name.replace("_", "-")
                raise InputError(
                    f"--{flag} {given} contradicts the manifest, which says {recorded[name]}; "
                    f"leave --{flag} out, or pack again"
                )
            values[name] = given
        return values


DEFAULTS: dict[str, Scalar] = {
    "cp": 1,
    "tp": 1,
    "sequence_parallel": False,
    "pad_multiple": None,
    "fp8": "none",
    "pad_packed_multiple": 1,
    "pad_packed_to": None,
    "tail": "absorb",
}


def _refuse_types(values: Mapping[str, Scalar]) -> None:
    """A manifest is input like any other: what it records may be anything."""
    for name, default in DEFAULTS.items():
        kind = int if default is None else type(default)
        value = values[name]
        if type(value) is not kind and not (value is None and default is None):
            raise InputError(
                f"manifest.json: geometry.{name} is {ascii(value)[:60]}, which is no "
                f"{kind.__name__}; pack again"
            )


def pack_geometry(values: Mapping[str, Any]) -> PackGeometry:
    """The PackGeometry of resolved option values (see :meth:`GeometryOptions.resolve`)."""
    from opdtool.core.geometry import PackGeometry

    return PackGeometry(
        cp_size=values["cp"],
        tp_size=values["tp"],
        sequence_parallel=values["sequence_parallel"],
        pad_multiple=values["pad_multiple"],
        fp8=values["fp8"],
        pad_packed_multiple=values["pad_packed_multiple"],
        pad_packed_to=values["pad_packed_to"],
        tail=values["tail"],
    )
