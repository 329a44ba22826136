"""Schedules: which step of an iteration runs when."""
