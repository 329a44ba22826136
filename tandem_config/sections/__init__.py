"""The sections of a run's configuration, a file for each part of the system that they set."""
