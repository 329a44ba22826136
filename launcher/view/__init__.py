"""Shows a run to its user: progress, `tandem status`, `tandem top`, summary and plot."""
