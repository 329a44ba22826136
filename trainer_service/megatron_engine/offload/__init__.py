"""Memory of what the trainer does not use goes to the host meanwhile, and comes back bitwise (`trainer.offload`)."""
