"""The coordinator: runs GRPO iterations over gRPC, on a CPU. Read `loop.py` first. Never imports torch."""
