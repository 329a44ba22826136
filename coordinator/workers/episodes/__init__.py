"""What a worker of environments does: open episodes, tools, and checks of what users' code returns."""
