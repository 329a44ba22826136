"""The modules of a decoder layer, and their spec."""
