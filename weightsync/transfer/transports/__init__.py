"""Transports: ways to carry messages between ranks."""
