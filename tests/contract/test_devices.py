"""Layers on two devices, as `device_map` puts them: every tensor takes its device from the keys."""

import pytest
import torch

import kvstrata

from .families import build, frozen
from .runs import ALL, feed, prompt, spec
from .second_device import DEVICE, Factories, Second


def on_two_devices():
    """A tiny llama whose layers 1 and 3 are on the second device, with hooks that move what they are given."""
    build.cache_clear()
    model = build("LlamaConfig", "LlamaForCausalLM", frozen({}))
    build.cache_clear()
    for index, layer in enumerate(model.model.layers):
        device = DEVICE if index % 2 else torch.device("cpu")
        if index % 2:
            for module in layer.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    module._parameters[name] = torch.nn.Parameter(Second(parameter.data), requires_grad=False)
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, device=device: moved(args, kwargs, device), with_kwargs=True
        )
    model.model.norm.register_forward_pre_hook(lambda _, args: moved(args, {}, torch.device("cpu"))[0])
    return model


def moved(args, kwargs, device):
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.thin(4)
def test_layers_on_two_devices_give_the_logits_of_one(name):
    ids, mask = prompt(46, 2), torch.ones(2, 46, dtype=torch.long)
    mask[0, :9] = 0
    one = build("LlamaConfig", "LlamaForCausalLM", frozen({}))
    with kvstrata.compress(one, spec(name, 14)) as cache:
        expected = feed(one, ids, cache, (20, 20), mask)
        kept = [cache.entries(layer, row, head) for layer in range(4) for row in range(2) for head in range(2)]
    two = on_two_devices()
    with Factories(), kvstrata.compress(two, spec(name, 14)) as cache:
        got = feed(two, ids, cache, (20, 20), mask)
        assert [cache.strata[layer].store.dense("k").device.type for layer in range(4)] == ["cpu", DEVICE.type] * 2
        assert kept == [cache.entries(layer, row, head) for layer in range(4) for row in range(2) for head in range(2)]
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.crop(-2)
        assert cache.report().layers[1].stored[0] == cache.report().layers[1].stored[1]
    real = mask.bool()
    assert (got - expected)[real].abs().max() <= 1e-5 * expected[real].abs().max()


def test_the_pretended_device_refuses_to_meet_the_first():
    with Factories(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(3).to(DEVICE) + torch.ones(3)
