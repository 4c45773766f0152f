"""A pytest plug-in that runs transformers' own generation tests with our cache in place of DynamicCache.

    python -m pytest -p tests.upstream CHECKOUT/tests/models/llama -k "generate or beam or assisted"

CHECKOUT is a source tree of the installed release of transformers, whose packages come without tests. Every call of
`generate` that would make a plain DynamicCache gets a full-budget cache of ours with exact kernels instead; calls that
bring a cache, or a model that cannot be compressed, run as they are. The last line of the run says how often each was.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps

from transformers import DynamicCache
from transformers.generation.utils import GenerationMixin

import kvstrata
from kvstrata.hf.compat import CACHE_KEYWORD

POLICY = "h2o:budget=100%"
replaced, left = [], []


def install():
    """Wrap `generate`; returns a function that takes the wrapping off."""
    generate, prepare = GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation
    open_blocks: list[ExitStack] = []

    @wraps(generate)
    def generate_with_ours(self, *args, **kwargs):
        with ExitStack() as stack:
            open_blocks.append(stack)
            try:
                return generate(self, *args, **kwargs)
            finally:
                open_blocks.remove(stack)

    @wraps(prepare)
    def prepare_ours(self, generation_config, model_kwargs, *args, **kwargs):
        prepare(self, generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get(CACHE_KEYWORD)
        if type(made) is not DynamicCache or made.get_seq_length() or not open_blocks:
            return
        try:
            ours = open_blocks[-1].enter_context(kvstrata.compress(self, POLICY, kernels="exact"))
        except kvstrata.KvstrataError as error:
            left.append(str(error))
            return
        replaced.append(type(self).__name__)
        model_kwargs[CACHE_KEYWORD] = ours

    GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation = generate_with_ours, prepare_ours

    def uninstall():
        GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation = generate, prepare

    return uninstall


def pytest_configure(config):
    config.add_cleanup(install())


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"generate ran {len(replaced)} times on a kvstrata cache; {len(left)} models were refused: "
        + "; ".join(sorted(set(left)))
    )
