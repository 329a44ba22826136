"""Receives and checks samples, deals them to ranks and packs them into micro-batches; only this package packs."""
