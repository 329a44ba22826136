"""Stored samples of a run: prompts and completions with rewards, as Parquet files in the run's folder `samples/`."""
