"""Schedules: which step of an iteration (steps.py) runs when."""
