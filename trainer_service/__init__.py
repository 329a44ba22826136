"""The Megatron trainer service: samples in, a new policy version out."""
