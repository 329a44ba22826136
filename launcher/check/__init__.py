"""`tandem check`: everything that can be known to be wrong before anything expensive starts."""
