"""The common parts of gRPC services: RPC, security, Redis, processes, errors, logs, metrics, tracing."""

import os

# Read when gRPC is first used. Its handlers for a fork poll in the child, whose descriptors subprocess closes before it
# runs the program: of children that were started by a busy server, a sixth ended by SIGABRT or SIGSEGV (grpc 1.85;
# its issue 43055). We never use gRPC in a process that was only forked.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
