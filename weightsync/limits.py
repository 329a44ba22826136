"""How much of a transfer is under way at once, and in what pieces: for the transports and, without torch, for the
simulation."""

SENDS = 2  # messages on their way out of a rank: the next one is packed while the last one moves
RECEIVES = (
    4  # messages that a rank is ready to receive, if it has buffers for them: its link does not wait for its core
)

# An op of at least so many bytes travels on its own, so that it can go from parameter to parameter without a copy. At
# a few GB/s it takes longer than what one more gloo message costs (about 30 us).
SEGMENT_BYTES = 256 * 1024


def number_of_buffers(size: int, largest_message: int) -> int:
    """Buffers of `size` bytes that a rank may use at once: no more than two of its largest messages would fill."""
    return max(2, 2 * largest_message // max(1, size))
