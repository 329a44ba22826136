"""Measures train steps: their FLOPs, the device's speed, memory, and traces with a table (torch.profiler)."""
