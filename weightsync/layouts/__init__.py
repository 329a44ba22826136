"""Where each engine keeps which slice of which parameter, as data. NumPy, no torch."""
