"""Layouts: the slices of parameters that each rank of an engine holds, as data. NumPy, no torch."""
