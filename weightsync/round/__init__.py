"""A weight-sync round as data: its phases, who takes part, what each needs, and how long each may take. No torch."""
