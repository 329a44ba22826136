"""A FAKE Kubernetes cluster, for what coordinators, operators and kubectl call; fake_cluster.py says what it lacks."""
