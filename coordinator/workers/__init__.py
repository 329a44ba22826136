"""Processes for code that may run for ever: pool.py is the coordinator's side, worker.py the other."""
