"""`tandem logs`: the logs of all services of a run as readable lines, in the order of their times."""
