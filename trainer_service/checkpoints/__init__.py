"""A trainer checkpoint as files: what is in which, and its tensors at any layout. No Megatron."""
