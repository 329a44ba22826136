"""Hooks in SGLang's scheduler processes: version flips, stop strings, seeds."""
