"""Benchmark of a train step against plain transformers, TRL and the matmul floor: `make bench-train`."""
