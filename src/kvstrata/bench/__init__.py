"""Measurements: bytes, time and agreement of policies with the full cache."""
