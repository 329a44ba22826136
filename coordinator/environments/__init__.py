"""Users' environments and tools, in worker processes: the coordinator's side."""
