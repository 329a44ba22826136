"""`tandem deploy`: writes a run's overlay for Kubernetes, checks it, and finds the run through the API alone."""
