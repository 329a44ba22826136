"""Writes a run's rows, state, checkpoints and summary, and judges its health from them."""
