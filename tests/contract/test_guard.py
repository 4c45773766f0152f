"""Layers whose keys would not survive their codes keep them exact, and say so."""

from dataclasses import replace

import pytest
import torch

import kvstrata
from kvstrata.kernels.codec import INT2, INT4, INT8, ROT4
from kvstrata.kernels.codec.packing import key_loss
from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.kernels.pages import Format

from .runs import kv, prompt, tiny

ROTARY = Rotary(1.0 / 10 ** (torch.arange(8) / 4))


def biased(layers=(1,), size=300.0):
    """Qwen2 whose keys have a large bias in some layers: rotary positions make it swing, and a grid must span that."""
    model = tiny("qwen2")
    model = model.__class__(model.config).eval()
    model.load_state_dict(tiny("qwen2").state_dict())
    for layer in layers:
        bias = model.model.layers[layer].self_attn.k_proj.bias
        bias.data = torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)) * size
    return model


def test_the_loss_of_codes_is_what_it_is():
    k = torch.randn(256, 16)
    for codec, most in ((INT8, 1e-4), (INT4, 0.01), (ROT4, 0.02), (INT2, 0.3)):
        assert 0 < key_loss(Format(codec, torch.float32, 16, 16), k, k) < most
    shifted = k + 300 * torch.randn(1, 16)
    position = torch.arange(256)
    turned = ROTARY.on(shifted, position)
    assert key_loss(Format(INT4, torch.float32, 16, 16), turned, shifted) > 1
    before = replace(INT4, key_space="pre")
    assert key_loss(Format(before, torch.float32, 16, 16), turned, ROTARY.off(turned, position)) < 0.02
    assert key_loss(Format(INT4, torch.float32, 16, 16), torch.ones(64, 16), torch.ones(64, 16)) == 0


@torch.no_grad()
@pytest.mark.parametrize("policy", ["int2", "full:codec=int4,exact=16", "qevict:budget=40%,recent=8"])
def test_a_layer_that_would_lose_its_keys_is_not_coded(policy):
    ids, model = prompt(260), biased()
    with kvstrata.compress(model, policy) as cache:
        model(ids, **kv(cache))
        report = cache.report()
    coded = [sum(count for tier, count in layer.tiers.items() if tier != "exact") for layer in report.layers]
    assert coded[1] == 0
    assert coded[0] > 0
    assert coded[2] > 0
    assert report.layers[1].key_loss > 1
    assert "not coded" in str(report)
    if policy.startswith("qevict"):
        assert cache.nbytes.live <= 0.4 * report.full


@torch.no_grad()
def test_before_rotary_positions_a_bias_costs_nothing():
    ids, model = prompt(260), biased()
    with kvstrata.compress(model, "full:codec=int2,key_space=pre") as cache:
        model(ids, **kv(cache))
    assert all(layer.tiers["int2"] > 0 for layer in cache.report().layers)
