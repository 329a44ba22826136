"""A round in simulated time: what a plan takes on machines that are not here. No torch."""
