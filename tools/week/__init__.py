"""A week of a run in fast motion: the real coordinator with fakes as services, and what grows meanwhile."""
