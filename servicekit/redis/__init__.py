"""Redis: one way to connect, leases, the registry of services, and what a user may do."""
