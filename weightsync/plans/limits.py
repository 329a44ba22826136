"""How much of a transfer is under way at once, and in what pieces: for the transports and, without torch, for the
simulation."""

# Largest message to a single replica where the run does not say: large enough for full bandwidth, small beside a shard.
DEFAULT_BUCKET_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
# Least where a chain makes it smaller: at 50 GB/s 4 MiB take 84 us, four times a message's latency, and it is the size
# at which simulated and measured rounds were compared; at the few GB/s of gloo 1 MiB takes some 400 us, and one
# message's handling 30 us.
LEAST_BUCKET_BYTES = {"cpu": 2**20, "cuda": 4 * 2**20}

# Messages on their way out of a rank: the next one is packed while the last one moves.
SENDS = 2
# Messages that a rank is ready to receive, as far as it has buffers for them: its link does not wait for its core.
RECEIVES = 4

# An op of at least so many bytes travels on its own, so that it can go from parameter to parameter without a copy. On
# CPUs it takes longer, at a few GB/s, than what one more gloo message costs (about 30 us). On GPUs a copy of 4 MiB
# takes a few us, while one more NCCL operation costs tens of them, and a digest of its own some 150 us of host time.
SEGMENT_BYTES = {"cpu": 256 * 1024, "cuda": 4 * 2**20}


def bucket_bytes(bucket_mib: float | None) -> int:
    """The setting sync.bucket_mib as a round carries it, in bytes. Returns: 0 where it is unset."""
    return 0 if bucket_mib is None else max(1, int(bucket_mib * 2**20))


def largest_message(asked_bytes: int, device: str, replicas: int) -> int:
    """Largest message of a round, in bytes: what it asks for; where that is 0, the default.

    device, replicas: as in `default_bucket_bytes`.
    """
    return asked_bytes or default_bucket_bytes(device, replicas)


def default_bucket_bytes(device: str, replicas: int) -> int:
    """Largest message where the run does not say, in bytes.

    Every replica of a chain adds one largest message's way to the round. So many replicas share one such way: together
    they cost no more than one message to a single replica, however long the chain is, down to the least size.

    Args:
        device: "cpu" or "cuda", of the ranks.
        replicas: of the round's longest chain.
    """
    return max(LEAST_BUCKET_BYTES[device], DEFAULT_BUCKET_BYTES[device] // max(1, replicas))


def number_of_buffers(size: int, largest_message: int) -> int:
    """Buffers of `size` bytes that a rank may use at once: no more than two of its largest messages would fill."""
    return max(2, 2 * largest_message // max(1, size))
