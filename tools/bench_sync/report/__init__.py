"""From samples to figures, and from figures to benchmarks/sync.md, its definitions and its plot."""
