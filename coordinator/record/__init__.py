"""What a run leaves on disk: rows, state, checkpoints, summary; and what they say about its health."""
