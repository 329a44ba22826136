"""What can be read from a model folder without torch: the tensors of its files, and its fingerprint."""
