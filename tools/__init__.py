"""What a developer of Tandem runs through the Makefile; nothing here is part of the distribution."""
