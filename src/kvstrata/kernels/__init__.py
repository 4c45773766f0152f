"""Attention over stored entries and the signals that come with it. Imports nothing of ours."""
