"""The coordinator's web page: the run at a glance, read only, without anything from elsewhere."""
