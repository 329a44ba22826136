"""Sizes and times of the wire, for servers and channels."""

from collections.abc import Mapping, Sequence

# gRPC's default of 4 MiB is less than a group of long completions. What can exceed this is streamed.
MAX_MESSAGE_BYTES = 64 * 2**20
# Bytes of a message in a stream of samples: far from the limit, and enough that a message's own cost does not count. A
# sample that is larger goes alone.
SAMPLE_CHUNK_BYTES = MAX_MESSAGE_BYTES // 16

# Completions that a message of Generate submits: all of them are held in memory together.
MAX_COMPLETIONS_PER_CALL = 1 << 17

# Calls of a method that a server works on at a time, and bytes of their requests, of those that are one message: more
# are refused with RESOURCE_EXHAUSTED and a time to wait. Each method has its own, so that calls that work displace
# none of status, weight sync or health. A run has a few times fewer: a stream for the training, one for evaluations
# and those of a coordinator that was replaced; a batch; but an episode for each completion.
MOST_CALLS = 64
MOST_CALLS_OF: Mapping[str, int] = {
    **dict.fromkeys(("Reset", "Step", "Close"), 2**14),
    "ScoreBatch": 2**12,  # reward.concurrency, of all runs
    **dict.fromkeys(("TrainStep", "ComputeLogprobs"), 8),
    "Generate": 32,
}
MOST_REQUEST_BYTES = 2**32

_MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_MESSAGE_OPTIONS,
    # Service addresses are direct; an http_proxy in the environment would swallow them.
    ("grpc.enable_http_proxy", 0),
    # A peer that vanished without closing its socket is noticed after 30 + 10 s, also during a long call.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Continue pings during a train step of an hour that sends nothing; by default they stop after two.
    ("grpc.http2.max_pings_without_data", 0),
    # Services restart within seconds: the default back-off of up to 120 s would delay reconnection.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name the time that one attempt may take, as does its SETTINGS frame: a busy peer needs longer than
    # a back-off. An attempt that is refused ends immediately.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_MESSAGE_OPTIONS,
    # With SO_REUSEPORT a second server on the same port starts without an error and takes half of the calls.
    ("grpc.so_reuseport", 0),
    # Accept the channels' keepalive pings; the default of 300 s answers them with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

# A deadline later than this counts as none: "no deadline" is infinity, or a date far in the future.
LONGEST_DEADLINE_S = 7 * 86_400.0

# The longest pause of a client within a stream that it sends. A coordinator has a step's samples at hand; one that was
# stopped for a while continues. After it nothing of the stream stays in memory.
STREAM_SILENCE_S = 300.0


def chunk_starts(bytes_S: Sequence[int], max_bytes: int) -> list[int]:
    """Cut consecutive samples into chunks of at most `max_bytes`; a larger sample is a chunk of its own.

    Args:
        bytes_S: [S] bytes of each sample.
    Returns: index of the first sample of every chunk but the first.

    >>> chunk_starts([3, 4, 5, 20, 1], 8)
    [2, 3, 4]
    """
    starts: list[int] = []
    size = 0
    for index, num_bytes in enumerate(bytes_S):
        if size > 0 and size + num_bytes > max_bytes:
            starts.append(index)
            size = 0
        size += num_bytes
    return starts
