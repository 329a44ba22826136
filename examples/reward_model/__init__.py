"""A reward model as a service."""
