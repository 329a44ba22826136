"""Examples to run and to start from; each folder has its own README."""
