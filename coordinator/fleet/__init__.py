"""Which rollout replicas there are, and which of them serve the current policy."""
