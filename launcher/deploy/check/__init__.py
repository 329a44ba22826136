"""What is wrong with an overlay before it is applied: in itself, and with the cluster that it is for."""
