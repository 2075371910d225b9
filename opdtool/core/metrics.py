"""Rescaling of loss metrics (contract 3.7)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from opdtool.core.errors import InputError


class MetricNormalizer(Enum):
    """What a metric was divided by when it was made."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


def as_normalizer(value: object) -> MetricNormalizer:
    """The normalizer that ``value`` means: one of ours, a foreign enum member of the same
    name, or the strings ``tokens``, ``sequences``, ``none``.

    Raises:
        InputError: anything else.
    """
    if isinstance(value, MetricNormalizer):
        return value
    name = value.name if isinstance(value, Enum) else value
    if isinstance(name, str) and name.upper() in MetricNormalizer.__members__:
        return MetricNormalizer[name.upper()]
    raise InputError(f"{value!r} is no normalizer; it is one of tokens, sequences, none")


def rescale_loss_metrics(
    metrics: Mapping[str, Any],
    normalizers: Mapping[str, Any],
    *,
    token_factor: Any,
    sequence_factor: Any,
) -> dict[str, Any]:
    """A new dict with every metric times the factor of its normalizer (contract 3.7).

    TOKENS takes ``token_factor``, SEQUENCES ``sequence_factor``, NONE 1.0; a metric with no
    normalizer is returned unchanged. Values are numbers or tensors of any shape; the input
    is not mutated. Splitting a batch into microbatches leaves a rescaled sum unchanged.

    Raises:
        InputError: a normalizer that is none of the three.
    """
    factors = {
        MetricNormalizer.TOKENS: token_factor,
        MetricNormalizer.SEQUENCES: sequence_factor,
        MetricNormalizer.NONE: 1.0,
    }
    return {
        name: value * factors[as_normalizer(normalizers[name])] if name in normalizers else value
        for name, value in metrics.items()
    }
