"""Rollout service: prompts in, tokens with log-probs and policy versions out; weights in."""
