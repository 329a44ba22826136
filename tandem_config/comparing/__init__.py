"""Comparisons of configurations: of a run with its checkpoint, and of the services of a run with each other."""
