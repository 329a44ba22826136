"""The fleet of rollout replicas: which are announced, and which serve the current policy."""
