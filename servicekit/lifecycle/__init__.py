"""The start and end of processes: signals, exit codes, children, temporary folders."""
