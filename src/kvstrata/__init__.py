"""Key-value-cache compression that really frees memory, as a cache for transformers."""

from kvstrata._version import __version__
from kvstrata.core import InputError, KvstrataError, SpecError, UnsupportedModelError
from kvstrata.hf import compress, prefill
from kvstrata.policy import LayerRange, Policy, Rule, parse_policy

__all__ = [
    "InputError",
    "KvstrataError",
    "LayerRange",
    "Policy",
    "Rule",
    "SpecError",
    "UnsupportedModelError",
    "__version__",
    "compress",
    "parse_policy",
    "prefill",
]
