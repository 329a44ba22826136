"""Checkpoints of a run: written, missed, found again."""
