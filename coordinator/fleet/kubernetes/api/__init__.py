"""The Kubernetes API as the coordinator uses it: its few calls, its errors in our vocabulary, its objects as data."""
