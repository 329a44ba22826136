"""How a process lives and ends: signals, exit codes, children, temporary folders."""
