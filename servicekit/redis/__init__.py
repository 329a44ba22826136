"""Redis: connections, leases, the registry of services, and the user's rights."""
