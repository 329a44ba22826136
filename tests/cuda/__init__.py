"""Tests of the CUDA environment; `make check-cuda` runs them in it, with a stub of the driver's library and no GPU."""
