"""Benchmark of weight sync against what SGLang offers by itself, and against the floor: `make bench-sync`."""
