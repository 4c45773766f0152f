"""Norms of products, every implementation against a plain product in float64."""

from __future__ import annotations

import math

import pytest
import torch

from kvstrata.kernels.norms import output_norms

try:
    from kvstrata import _native
except ImportError:
    _native = None

CASES = [(1, 1, 1, 1, 8), (2, 2, 3, 40, 16), (1, 3, 3, 700, 64), (1, 2, 1, 5, 80), (1, 1, 2, 12, 13), (1, 1, 7, 9, 256)]


def made(batch, heads, group, values, dim):
    return torch.randn(heads * group, dim, dim), torch.randn(batch, values, heads, dim).transpose(1, 2)


def truth(outputs, v):
    product = torch.einsum("hgji,bhsj->bhgsi", outputs.double().unflatten(0, (v.shape[1], -1)), v.double())
    return product.norm(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_implementation_agrees_with_a_plain_product(kernels, case, dtype):
    outputs, v = made(*case)
    got, true = output_norms(outputs, v.to(dtype), kernels), truth(outputs, v.to(dtype))
    assert got.shape == true.shape
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), true, rtol=1e-5)


def test_no_values_have_no_norms(kernels):
    outputs, v = made(1, 2, 2, 4, 16)
    assert output_norms(outputs, v[:, :, :0], kernels).shape == (1, 2, 2, 0)


@pytest.mark.parametrize("dim", [8, 13, 24, 64])
def test_an_infinite_value_is_infinite(kernels, dim):
    outputs, v = made(1, 1, 1, 9, dim)
    v[0, 0, 2, 0] = math.inf
    got = output_norms(outputs.abs(), v.abs(), kernels)[0, 0, 0]
    assert got.isinf().nonzero().flatten().tolist() == [2]
    assert got.isfinite().sum() == 8


def test_a_nan_value_spoils_no_other(kernels):
    outputs, v = made(1, 2, 2, 20, 16)
    v[:, :, 7] = math.nan
    got = output_norms(outputs, v, kernels).isnan()
    assert got[..., 7].all()
    assert got.sum() == got[..., 7].numel()


@pytest.mark.skipif(_native is None, reason="no native kernels")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": torch.zeros(3, 16, 16)}, "multiple"),
        ({"outputs": torch.zeros(4, 16, 15)}, "outputs"),
        ({"outputs": torch.zeros(0, 16, 16)}, "multiple"),
        ({"v": torch.zeros(1, 2, 0, 16)}, "empty"),
        ({"v": torch.zeros(1, 2, 4, 16, dtype=torch.float64)}, "float32, bfloat16 or float16"),
        ({"norms_out": torch.zeros(1, 2, 2, 5)}, "norms_out"),
        ({"threads": 0}, "threads"),
    ],
    ids=str,
)
def test_bad_calls_raise(change, message):
    call = {"outputs": torch.zeros(4, 16, 16), "v": torch.zeros(1, 2, 4, 16), "norms_out": torch.zeros(1, 2, 2, 4)}
    with pytest.raises(ValueError, match=message):
        _native.output_norms(**{**call, **change})
