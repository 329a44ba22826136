"""Connections between the ranks of an epoch: gloo and NCCL, built under a deadline, watched while they work."""
