"""Writes the run's ledger, and restores from it what a crash has left unfinished (docs/ledger.md)."""
