"""What any of our gRPC services needs: rpc, security, Redis, a process's life, errors, logs, metrics, tracing."""
