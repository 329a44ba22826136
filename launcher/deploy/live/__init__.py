"""The API server as an operator reaches it, and the kinds of objects that a run has there."""
