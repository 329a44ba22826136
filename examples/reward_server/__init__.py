"""A reward of one's own as a service."""
