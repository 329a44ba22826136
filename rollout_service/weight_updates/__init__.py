"""Step 9, receive the weights: the replica's states, and a round as a transaction on them."""
