"""Who takes part: slots, leases and epochs in Redis, the coordinator's lease, and what ranks must have in common."""
