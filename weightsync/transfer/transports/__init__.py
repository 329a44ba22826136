"""Ways to carry messages between ranks."""
