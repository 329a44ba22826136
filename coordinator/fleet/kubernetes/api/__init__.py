"""The Kubernetes API as the coordinator uses it: calls, errors as TandemErrors, objects as data."""
