"""`tandem compare`: the curves, times and settings of several runs side by side."""
