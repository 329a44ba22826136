"""`tandem deploy`: writes a run's overlay for Kubernetes, and checks it against the cluster."""
