"""The trainer's ranks: how they meet, obey rank 0, and notice that one is gone."""
