"""Authentication of callers: certificates, mutual TLS and the run's token."""
