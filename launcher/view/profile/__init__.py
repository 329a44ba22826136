"""`tandem profile`: where the time of a profiled train step went."""
