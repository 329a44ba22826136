"""The trainer's ranks: how they connect, execute the commands of rank 0, and notice a lost rank."""
