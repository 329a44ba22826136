"""Step 9: new weights come in. The replica's states, and a round as a transaction on them."""
