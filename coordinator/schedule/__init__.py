"""Schedules: which step of an iteration runs when (sync.py); and the steps themselves (steps.py)."""
