"""Step 1: prompts, in an order that resumes exactly."""
