"""Transfer plans: the bytes that move between ranks, the messages, and their cost. NumPy, no torch."""
