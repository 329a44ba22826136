"""What happens in a run, for those who watch and steer it: events, control, metrics."""
