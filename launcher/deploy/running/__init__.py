"""A run as it is in the cluster: found by its label, through the API server and nothing else."""
