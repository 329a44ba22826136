"""`tandem deploy fetch`: models and data come onto the claim by a Job in the cluster, not through this machine."""
