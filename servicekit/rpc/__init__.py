"""gRPC servers and channels: one error mapping, bounds for every request, deadlines, health."""
