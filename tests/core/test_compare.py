"""Comparison statistics over tiles are those of the whole; the derived bound holds and bites."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from opdtool.core import compare
from opdtool.core.bounds import (
    ErrorBound,
    RowsAndColumns,
    derived_bound,
    given_bound,
    stored_precision,
)
from opdtool.core.compare import Comparison

HALF = [torch.bfloat16, torch.float16]


def filled(
    rebuilt: Tensor,
    reference: Tensor,
    bound: ErrorBound,
    *,
    slots: int = 3,
    columns: int = 4,
    norms: RowsAndColumns | None = None,
) -> Comparison:
    """A comparison fed in tiles, columns first."""
    found = Comparison(len(rebuilt), bound, overflow=reference.dtype)
    norms = norms or RowsAndColumns()
    for c in range(0, rebuilt.shape[1], columns):
        for s in range(0, len(rebuilt), slots):
            tile = (slice(s, s + slots), slice(c, c + columns))
            found.add(s, c, rebuilt[tile], reference[tile], part(norms, *tile))
    return found


def part(norms: RowsAndColumns, rows: slice, columns: slice) -> RowsAndColumns:
    return RowsAndColumns(
        rows=None if norms.rows is None else norms.rows[rows],
        columns=None if norms.columns is None else norms.columns[columns],
        rows4=None if norms.rows4 is None else norms.rows4[rows],
        columns4=None if norms.columns4 is None else norms.columns4[columns],
    )


def norms_of(hidden: Tensor, head: Tensor) -> RowsAndColumns:
    x, w = hidden.double(), head.double()
    return RowsAndColumns(
        rows=x.norm(dim=-1).float(),
        columns=w.norm(dim=-1).float(),
        rows4=x.norm(4, dim=-1).float(),
        columns4=w.norm(4, dim=-1).float(),
    )


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    rebuilt = torch.randn(7, 10, generator=made) * 3
    return rebuilt, rebuilt + torch.randn(7, 10, generator=made) * 0.3


@pytest.mark.parametrize(("slots", "columns"), [(7, 10), (3, 4), (1, 1), (2, 10)])
def test_statistics_over_tiles_are_those_of_the_whole(slots: int, columns: int) -> None:
    rebuilt, reference = pair()
    found = filled(rebuilt, reference, given_bound(0.1, 0.2), slots=slots, columns=columns)
    a, r = rebuilt.double().numpy(), reference.double().numpy()
    error = np.abs(a - r)
    allowed = 0.2 + 0.1 * np.abs(r)
    wrong = np.argwhere(error > allowed)
    assert 10 < len(wrong) < a.size
    assert found.total == a.size
    assert found.mismatches == len(wrong)
    assert [(p.slot, p.column) for p in found.first] == [tuple(w) for w in wrong[:10].tolist()]
    for greatest, values in (
        (found.absolute, error),
        (found.relative, error / np.abs(r)),
        (found.multiple, error / allowed),
    ):
        assert greatest.value == pytest.approx(values.max(), rel=1e-5)
        assert greatest.place is not None
        where = np.unravel_index(values.argmax(), values.shape)
        assert (greatest.place.slot, greatest.place.column) == where
        assert greatest.place.rebuilt == pytest.approx(a[where])
        assert greatest.place.reference == pytest.approx(r[where])
    assert np.allclose(found.worst.numpy(), (error / allowed).max(axis=1), rtol=1e-5)
    log_a = a - np.log(np.exp(a).sum(1, keepdims=True))
    log_r = r - np.log(np.exp(r).sum(1, keepdims=True))
    assert np.allclose(
        found.log_prob_errors.numpy(), np.abs(log_a - log_r).max(1), rtol=1e-4, atol=1e-6
    )
    kl = (np.exp(log_r) * (log_r - log_a)).sum(1)
    assert kl.max() > 1e-3
    assert np.allclose(found.divergences.numpy(), kl, rtol=1e-3, atol=1e-6)
    agrees = a.argmax(1) == r.argmax(1)
    assert np.array_equal(found.top1_agrees.numpy(), agrees)
    assert np.array_equal(found.top_recorded.numpy(), r.argmax(1))


def test_top1_disagreement_is_seen() -> None:
    rebuilt = torch.tensor([[1.0, 2.0, 0.0], [5.0, 0.0, 0.0]])
    reference = torch.tensor([[2.0, 1.0, 0.0], [5.0, 0.0, 0.0]])
    found = filled(rebuilt, reference, given_bound(0, 9), columns=1)
    assert found.top1_agrees.tolist() == [False, True]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_shards_of_the_vocabulary_merge(order: tuple[int, ...]) -> None:
    rebuilt, reference = pair(1)
    bound = given_bound(0.05, 0.1)
    whole = filled(rebuilt, reference, bound)
    cuts = [slice(0, 3), slice(3, 4), slice(4, 10)]
    parts = []
    for cut in cuts:
        one = Comparison(7, bound)
        one.add(0, cut.start, rebuilt[:, cut], reference[:, cut], RowsAndColumns())
        parts.append(pickle.loads(pickle.dumps(one)))
    merged = parts[order[0]]
    for number in order[1:]:
        merged.merge(parts[number])
    assert merged.first == whole.first
    assert (merged.total, merged.mismatches) == (whole.total, whole.mismatches)
    for name in ("absolute", "relative", "multiple"):
        assert getattr(merged, name).place == getattr(whole, name).place
    assert torch.equal(merged.top_recorded, whole.top_recorded)
    assert torch.allclose(merged.divergences, whole.divergences, atol=1e-5)
    assert torch.allclose(merged.log_prob_errors, whole.log_prob_errors, atol=1e-5)


def test_the_least_tolerance_that_would_pass_passes_and_a_hair_less_does_not() -> None:
    rebuilt, reference = pair(2)
    found = filled(rebuilt, reference, given_bound(None, None))
    for rtol, atol in ((None, found.absolute.value), (found.relative.value, None)):
        for factor, passes in ((1 + 1e-5, True), (1 - 1e-5, False)):
            bound = given_bound(
                None if rtol is None else rtol * factor, None if atol is None else atol * factor
            )
            assert (filled(rebuilt, reference, bound).mismatches == 0) is passes


def test_padding_columns_are_compared_but_are_in_no_softmax() -> None:
    rebuilt, reference = pair(3)
    reference[:, 8:] += 50.0
    found = Comparison(7, given_bound(0, 2))
    found.add(0, 0, rebuilt[:, :8], reference[:, :8], RowsAndColumns())
    found.add(0, 8, rebuilt[:, 8:], reference[:, 8:], RowsAndColumns(), vocabulary=False)
    assert found.mismatches == 14
    assert float(found.divergences.max()) < 1
    assert int(found.top_recorded.max()) < 8


def test_what_is_not_finite_matches_only_itself() -> None:
    inf, nan = torch.inf, torch.nan
    rebuilt = torch.tensor([[-inf, inf, 1.0, inf, nan, 1.0, 2.0, 0.0]])
    reference = torch.tensor([[-inf, inf, inf, 1.0, 1.0, nan, 2.0, 0.0]])
    found = filled(rebuilt, reference, derived_bound(width=4, reference=torch.float32), columns=8)
    assert [place.column for place in found.first] == [2, 3, 4, 5]
    assert found.absolute.value == math.inf
    both = torch.tensor([[nan, 1.0]])
    assert filled(both, both, given_bound(1, 1)).mismatches == 1


def test_a_column_that_both_mask_with_minus_infinity_drops_out() -> None:
    rebuilt, reference = pair(4)
    kept = filled(rebuilt[:, :9], reference[:, :9], given_bound(1, 1), columns=5)
    rebuilt[:, 9] = reference[:, 9] = -torch.inf
    found = filled(rebuilt, reference, given_bound(1, 1), columns=5)
    assert found.mismatches == 0
    assert torch.allclose(found.divergences, kept.divergences, atol=1e-6)
    assert torch.allclose(found.log_prob_errors, kept.log_prob_errors, atol=1e-5)


def test_float16_that_overflowed_matches_a_product_past_its_range() -> None:
    reference = torch.tensor([[torch.inf, torch.inf]], dtype=torch.float16)
    rebuilt = torch.tensor([[70000.0, 60000.0]])
    bound = derived_bound(width=4, reference=torch.float16)
    found = filled(rebuilt, reference, bound)
    assert [place.column for place in found.first] == [1]


def test_exactly_equal_zeros_pass_a_tolerance_of_zero() -> None:
    zeros = torch.zeros(2, 3)
    found = filled(zeros, zeros, given_bound(None, None))
    assert (found.mismatches, found.absolute.value, found.relative.value) == (0, 0.0, 0.0)
    assert filled(zeros + 1e-30, zeros, given_bound(None, None)).mismatches == 6


@pytest.mark.parametrize("narrow", HALF)
def test_the_precision_of_widened_logits_is_seen(narrow: torch.dtype) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert stored_precision(values) == torch.float32
    assert stored_precision(values.to(narrow).float()) == narrow
    assert stored_precision(values.to(narrow)) == narrow
    assert stored_precision(torch.tensor([0.0, -torch.inf])) == torch.float32


def test_a_bound_says_its_formula() -> None:
    bound = derived_bound(width=64, reference=torch.bfloat16)
    assert bound.describe() == "|a-ref| <= 0.008301*|ref| + 7.629e-06*|x|*|w|"
    assert given_bound(0.5, 0.25).describe() == "|a-ref| <= 0.5*|ref| + 0.25"
    assert given_bound(None, None).describe() == "|a-ref| <= 0"
    scaled = derived_bound(width=64, reference=torch.float32, operand=torch.float16).scaled(-2.0)
    assert "|x|_4*|w|_4" in scaled.describe()
    assert scaled.accumulation == pytest.approx(2 * 64 * 2.0**-23)


def operands(dtype: torch.dtype, H: int, seed: int, peaked: bool) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(24, H, generator=made)
    w = torch.randn(96, H, generator=made) * 0.05
    if peaked:  # massive activations: a few dimensions carry nearly everything
        x[:, :2] *= 50
        w[:, :2] *= 20
    return x.to(dtype), w.to(dtype)


def orders(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """The product summed in several orders, in float32, as kernels differ."""
    a, b = x.float(), w.float()
    H = x.shape[1]
    backwards = torch.zeros(len(a), len(b))
    one_by_one = torch.zeros(len(a), len(b))
    for h in range(H):
        one_by_one += a[:, h, None] * b[None, :, h]
        backwards += a[:, H - 1 - h, None] * b[None, :, H - 1 - h]
    half = a[:, : H // 2] @ b[:, : H // 2].t() + a[:, H // 2 :] @ b[:, H // 2 :].t()
    exact = (x.double() @ w.double().t()).float()
    return {"forward": one_by_one, "backward": backwards, "halves": half, "exact": exact}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("H", [1, 2, 17, 64, 256])
@pytest.mark.parametrize("peaked", [False, True])
def test_a_right_product_passes_in_every_dtype_and_order_of_summing(
    dtype: torch.dtype, H: int, peaked: bool
) -> None:
    seen = 0
    for seed in range(3):
        x, w = operands(dtype, H, seed, peaked)
        rebuilt = x.float() @ w.float().t()
        for reference_dtype in {dtype, torch.float32, torch.float64}:
            bound = derived_bound(width=H, reference=reference_dtype)
            cases = orders(x, w) | {"native": x @ w.t()}
            if reference_dtype != dtype:
                del cases["native"]
            for name, product in cases.items():
                reference = product.to(reference_dtype)
                found = filled(
                    rebuilt, reference, bound, slots=24, columns=96, norms=norms_of(x, w)
                )
                assert found.mismatches == 0, (name, found.multiple)
                seen += 1
    assert seen >= 20


@pytest.mark.parametrize("reference_dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("H", [64, 2048])
def test_one_weight_row_a_tenth_off_is_noticed(reference_dtype: torch.dtype, H: int) -> None:
    x, w = operands(torch.bfloat16, H, 0, peaked=False)
    off = w.float()
    off[17] *= 1.1
    rebuilt = x.float() @ w.float().t()
    reference = (x.float() @ off.t()).to(reference_dtype)
    bound = derived_bound(width=H, reference=reference_dtype)
    found = filled(rebuilt, reference, bound, slots=24, columns=96, norms=norms_of(x, w))
    assert found.mismatches > 12
    assert {place.column for place in found.first} == {17}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("roundings", [1, 2])
@pytest.mark.parametrize("peaked", [False, True])
def test_rounded_operands_pass_with_their_own_term_and_fail_without(
    dtype: torch.dtype, roundings: int, peaked: bool
) -> None:
    H = 256
    x, w = operands(torch.float32, H, 0, peaked)
    w = w.to(dtype).float()
    rounded = x
    for number in range(roundings):
        gain = 1.0 + 0.37 * number
        rounded = (rounded * gain).to(dtype).float() / gain
    rebuilt, reference = x @ w.t(), rounded @ w.t()
    plain = derived_bound(width=H, reference=torch.float32)
    wide = derived_bound(
        width=H, reference=torch.float32, operand=dtype, operand_roundings=roundings
    )
    norms = norms_of(x, w)
    assert filled(rebuilt, reference, plain, norms=norms).mismatches > 0
    assert filled(rebuilt, reference, wide, norms=norms).mismatches == 0


def test_large_tiles_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "TILE", 20)
    rebuilt, reference = pair(5)
    found = filled(rebuilt, reference, given_bound(0.1, 0.1), slots=7, columns=10)
    monkeypatch.undo()
    whole = filled(rebuilt, reference, given_bound(0.1, 0.1), slots=7, columns=10)
    assert found.first == whole.first
    assert torch.allclose(found.divergences, whole.divergences)
