"""Rewards that a server gives: its calls, their repetition, and the circuit that opens while the server is down."""
