"""`tandem samples`: a run's stored samples in the terminal."""
