"""Who may call: certificates, mutual TLS and the run's token."""
