"""What rewards have in common, and the settings of those that ask a server."""
