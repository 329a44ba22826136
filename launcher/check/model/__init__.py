"""Checks of the model: its folder, its weights, and how the trainer cuts it."""
