"""The environment for NVIDIA GPUs: its locks, and what it takes to try it on a machine without one."""
