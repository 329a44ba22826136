"""The processes of a case, how they are started, and the commands that they take."""
