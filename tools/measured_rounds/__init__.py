"""`python -m tools.measured_rounds`: rounds measured beside rounds simulated; the table of docs/weight-sync.md."""
