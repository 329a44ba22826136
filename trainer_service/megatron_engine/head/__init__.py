"""The output layer: from hidden states of completion positions to log-probs and entropies, in chunks."""
