"""Checks across keys, one file per part of the configuration; cross_checks.py runs all of them."""
