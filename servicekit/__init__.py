"""What any of our gRPC services needs and nothing of RL: servers, channels, errors, logs, metrics, registry."""
