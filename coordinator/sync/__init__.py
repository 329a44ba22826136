"""Step 8: the weight-sync round as a transaction over trainer and replicas."""
