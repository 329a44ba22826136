"""Observes and controls a run: events, state, metrics."""
