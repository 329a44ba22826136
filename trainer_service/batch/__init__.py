"""Samples in: received, checked, dealt to ranks and cut into micro-batches."""
