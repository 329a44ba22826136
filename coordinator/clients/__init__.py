"""Clients of trainer and replicas, and the probes that notice a lost service during a call."""
