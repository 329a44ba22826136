"""Clients of the services: trainer and replicas, and how they are asked whether they still live."""
