"""The conductor of a run: GRPO iterations over gRPC, on a CPU. Read `loop.py` first. Never imports torch."""
