"""A model's sizes, the names and shapes of its parameters, and the table that maps them between engines. No torch."""
