"""Simulates a round on other machines. No torch."""
