"""The common parts of gRPC services: RPC, security, Redis, processes, errors, logs, metrics, tracing."""
