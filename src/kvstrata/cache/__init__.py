"""One cache of one model: clocks, positions, when to ask the policy, and the report. Knows nothing of transformers."""

from kvstrata.cache.cache import PolicyCache
from kvstrata.cache.layer import Layer
from kvstrata.cache.report import LayerReport, Report

__all__ = ["Layer", "LayerReport", "PolicyCache", "Report"]
