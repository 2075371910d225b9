"""Rescaling of loss metrics."""

from __future__ import annotations

from enum import Enum

import pytest
import torch

from opdtool.core.metrics import MetricNormalizer, rescale_loss_metrics


class TheirNormalizer(Enum):
    TOKENS = 7
    SEQUENCES = 8
    NONE = 9


def test_each_metric_takes_the_factor_of_its_normalizer() -> None:
    metrics = {"loss": 2.0, "reward": 3.0, "lr": 0.5, "step": 4}
    normalizers = {
        "loss": MetricNormalizer.TOKENS,
        "reward": MetricNormalizer.SEQUENCES,
        "lr": MetricNormalizer.NONE,
    }
    got = rescale_loss_metrics(metrics, normalizers, token_factor=10.0, sequence_factor=100.0)
    assert got == {"loss": 20.0, "reward": 300.0, "lr": 0.5, "step": 4}
    assert metrics == {"loss": 2.0, "reward": 3.0, "lr": 0.5, "step": 4}


@pytest.mark.parametrize("one", [TheirNormalizer.TOKENS, "tokens", MetricNormalizer.TOKENS])
def test_a_foreign_enum_or_a_string_counts_as_the_same_normalizer(one: object) -> None:
    got = rescale_loss_metrics({"x": 2.0}, {"x": one}, token_factor=5.0, sequence_factor=1.0)
    assert got == {"x": 10.0}


@pytest.mark.parametrize(
    ("normalizer", "want"),
    [
        ("tokens", 10.0),
        ("sequences", 200.0),
        ("none", 2.0),
        (TheirNormalizer.TOKENS, 10.0),
        (TheirNormalizer.SEQUENCES, 200.0),
        (TheirNormalizer.NONE, 2.0),
    ],
)
def test_strings_and_foreign_members_take_the_factor_of_their_name(
    normalizer: object, want: float
) -> None:
    got = rescale_loss_metrics(
        {"x": 2.0}, {"x": normalizer}, token_factor=5.0, sequence_factor=100.0
    )
    assert got == {"x": want}


@pytest.mark.parametrize("none", ["rows", 3, None])
def test_another_normalizer_is_refused(none: object) -> None:
    with pytest.raises(ValueError, match="tokens, sequences, none"):
        rescale_loss_metrics({"x": 2.0}, {"x": none}, token_factor=5.0, sequence_factor=1.0)


def test_tensors_are_rescaled_without_touching_the_input() -> None:
    value = torch.tensor([1.0, 2.0])
    got = rescale_loss_metrics(
        {"x": value}, {"x": "tokens"}, token_factor=torch.tensor(2.0), sequence_factor=1.0
    )
    assert got["x"].tolist() == [2.0, 4.0]
    assert value.tolist() == [1.0, 2.0]
