"""`tandem scale`: how many replicas a run of `tandem run` has."""
