"""What a user sees of a run: progress, `tandem status`, `tandem top`, summary and plot."""
