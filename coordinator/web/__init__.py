"""The coordinator's web page: an overview of the run, read-only, without files from other servers."""
