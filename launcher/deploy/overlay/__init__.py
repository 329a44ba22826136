"""Writes the overlay of a run: a folder that `kubectl apply -k` takes and Git keeps."""
