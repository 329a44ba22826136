"""The `tandem` command: checks a configuration, starts every service of a run on this machine and shows how it goes."""
