"""The coordinator: runs GRPO iterations over gRPC, on a CPU. Read `schedule/sync.py` first. Never imports torch."""
