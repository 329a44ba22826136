"""Which bytes go from which rank to which, in which messages, and what that costs. NumPy, no torch."""
