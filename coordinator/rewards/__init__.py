"""Step 4: rewards. One file per reward; `registry` builds the one that the configuration names."""
