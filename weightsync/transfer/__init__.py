"""A rank's part in a round: its memory, its connections, and the bytes. The only part that needs torch."""
