"""A rank's part in a round: its memory, its connections, and the bytes. Only this part needs torch."""
