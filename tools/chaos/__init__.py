"""`make chaos`: seeded harm to a run on real engines, one fault after the other, and what the ledger says of it."""
