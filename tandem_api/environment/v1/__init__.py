"""Generated from protos/ (make proto); do not edit."""
