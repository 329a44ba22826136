"""Rows of JSONL and Parquet files: which files, what a row must hold, and every problem with its file and line."""
