"""Users' environments and tools as a service: an example, which serves any of them (docs/environments.md)."""
