"""`tandem plan`: what a weight sync would move and how long it would take, without a GPU."""
