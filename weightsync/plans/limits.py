"""Limits of a transfer: sizes of messages and segments, and how many are in flight; for transports and simulation."""

# Default of the largest message to a single replica: large enough for full bandwidth, small compared with a shard.
DEFAULT_BUCKET_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
# Lower bound of the default for long chains: at 50 GB/s 4 MiB take 84 us, four times a message's latency. At this size
# simulated and measured rounds were compared; at the few GB/s of gloo 1 MiB takes some 400 us, and one message's
# handling 30 us.
LEAST_BUCKET_BYTES = {"cpu": 2**20, "cuda": 4 * 2**20}

# Messages that a rank sends concurrently: the next one is packed while the last one moves.
SENDS = 2
# Messages that a rank is ready to receive, if it has the buffers: so its link does not wait for its core.
RECEIVES = 4

# An op of at least so many bytes is a segment of its own, so that it goes from parameter to parameter without a copy.
# On CPUs the copy takes longer, at a few GB/s, than what one more gloo message costs (about 30 us). On GPUs a copy of 4
# MiB takes a few us, one more NCCL operation tens of us. A digest of its own takes some 150 us of host time.
SEGMENT_BYTES = {"cpu": 256 * 1024, "cuda": 4 * 2**20}


def bucket_bytes(bucket_mib: float | None) -> int:
    """Convert sync.bucket_mib to bytes, as a round carries it. Returns: 0 if it is unset."""
    return 0 if bucket_mib is None else max(1, int(bucket_mib * 2**20))


def largest_message(asked_bytes: int, device: str, replicas: int) -> int:
    """Return the largest message of a round, in bytes: `asked_bytes`, or the default if that is 0.

    Args:
        device: as in `default_bucket_bytes`.
        replicas: as in `default_bucket_bytes`.
    """
    return asked_bytes or default_bucket_bytes(device, replicas)


def default_bucket_bytes(device: str, replicas: int) -> int:
    """Return the default of the largest message, in bytes.

    Every replica of a chain adds the time of one hop of a largest message. Therefore the default is divided by the
    replicas, down to the lower bound: all hops together take as long as one message to a single replica.

    Args:
        device: "cpu" or "cuda", of the ranks.
        replicas: replicas of the round's longest chain.
    """
    return max(LEAST_BUCKET_BYTES[device], DEFAULT_BUCKET_BYTES[device] // max(1, replicas))


def number_of_buffers(size: int, largest_message: int) -> int:
    """Return how many buffers of `size` bytes a rank may use: as many as two of its largest messages fill."""
    return max(2, 2 * largest_message // max(1, size))
