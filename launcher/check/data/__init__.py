"""Checks of the data: its rows, their lengths and answers, tokenizer and chat template."""
