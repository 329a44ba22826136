"""A FAKE cluster, for what an operator's machine calls."""
