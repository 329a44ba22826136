"""The environment for NVIDIA GPUs: its locks, and checks of it that need no GPU."""
