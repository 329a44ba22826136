"""Steps 4 to 6: rewards, advantages, and the batch that the trainer gets."""
