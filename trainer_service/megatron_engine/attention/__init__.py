"""Attention within the sequences of a packed row."""
