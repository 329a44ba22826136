"""Stores the samples of finished iterations as Parquet, within a budget."""
