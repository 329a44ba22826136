"""Megatron's own options of speed and memory, from the configuration's keys to megatron-core's arguments."""
