"""Rollout service: turn prompts into tokens with log-probs and policy versions; receive weights."""
