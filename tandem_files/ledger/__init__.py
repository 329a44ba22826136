"""What became of each prompt that a run has taken: an append-only log in the run's folder (docs/ledger.md)."""
