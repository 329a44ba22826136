"""How much of a transfer is under way at once, and in what pieces: for the transports and, without torch, for the
simulation."""

# Largest message where the run does not say: large enough for full bandwidth, small beside a shard.
DEFAULT_BUCKET_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}

# Messages on their way out of a rank: the next one is packed while the last one moves.
SENDS = 2
# Messages that a rank is ready to receive, as far as it has buffers for them: its link does not wait for its core.
RECEIVES = 4

# An op of at least so many bytes travels on its own, so that it can go from parameter to parameter without a copy. On
# CPUs it takes longer, at a few GB/s, than what one more gloo message costs (about 30 us). On GPUs a copy of 4 MiB
# takes a few us, while one more NCCL operation costs tens of them, and a digest of its own some 150 us of host time.
SEGMENT_BYTES = {"cpu": 256 * 1024, "cuda": 4 * 2**20}


def number_of_buffers(size: int, largest_message: int) -> int:
    """Buffers of `size` bytes that a rank may use at once: no more than two of its largest messages would fill."""
    return max(2, 2 * largest_message // max(1, size))
