"""Step 1: prompts, in an order that can be resumed exactly."""
