"""`python -m launcher` is the `tandem` command."""

from launcher.cli import main

main()
