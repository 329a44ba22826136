"""Sends each iteration's figures to experiment trackers, one adapter per tracker; their libraries are imported late."""
