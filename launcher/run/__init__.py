"""`tandem run`: the processes of a run on this machine, from start to end."""
