"""Rollout replicas that are pods: watched, drained, scaled and, when stuck, evicted through the Kubernetes API."""
