"""A weight-sync round as data: its phases, participants, order and deadlines. No torch."""
