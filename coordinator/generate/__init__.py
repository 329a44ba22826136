"""Steps 2 and 3: prompts to groups of completions, spread over the replicas."""
